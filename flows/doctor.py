"""Is this machine fit to run Tether? One finding a line, each with what to do."""

import importlib.metadata
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from packaging.version import Version

from components.base.errors import TetherError
from components.base.redaction import redacted
from components.base.text import plain
from components.models.runtime import Runtime, has_cuda
from components.store.store import ArtifactStore
from flows.data.pretrained import MODELS, model_folder
from tasks.prefect_flow.server import no_answer

CONSTRAINTS = Path(__file__).resolve().parent.parent / "infra" / "constraints.txt"
DISK_GB = 5.0

BREAKING = (
    ("fastapi", "0.151", "every flow of Prefect 3.8.8 fails"),
    ("sqlalchemy", "2.1", "Prefect's scheduler dies silently: a cron schedule creates no run"),
)
"""What a plain `pip install prefect==3.8.8 mlflow` may draw in: from which version on, and what it breaks."""

Level = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """One thing looked at."""

    level: Level
    what: str
    text: str


def diagnose(home: Path) -> list[Finding]:
    """Everything `tether doctor` looks at."""
    return [
        _python(),
        *_torch(),
        _runtime(),
        *_disk(home),
        _store(home),
        *_versions(),
        *breaking(),
        *_servers(),
        _packages(),
        *_models(home),
    ]


def print_findings(findings: Sequence[Finding]) -> bool:
    """Print them; returns whether none failed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for level, what, text in findings:
        table.add_row(Text(level, {"ok": "green", "note": "yellow", "fail": "red"}[level]), what, Text(plain(text)))
    Console().print(table)
    return all(each.level != "fail" for each in findings)


def _python() -> Finding:
    version = platform.python_version()
    fine = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Finding("ok" if fine else "fail", "Python", version if fine else f"{version}; Tether needs 3.11 or 3.12")


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("fail", "torch", f"does not import: {error}. Run `make install`.")]
    found = [Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads by default")]
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        found.append(Finding("ok", "GPU", names))
    elif has_cuda():
        told = "the NVIDIA driver is loaded, but this torch can't use it: runtime.device=cpu"
        found.append(Finding("fail", "GPU", told))
    else:
        found.append(Finding("note", "GPU", "none; everything runs on the CPU"))
    return found


def _runtime() -> Finding:
    here = Runtime().resolve()
    text = f"device {here.device}, {here.dtype}, {here.threads} threads, {here.instruction_set}"
    return Finding("ok", "a run here", f"{text} (part of every key)")


def _disk(home: Path) -> list[Finding]:
    folder = next(each for each in (home, *home.parents) if each.exists())
    free = shutil.disk_usage(folder).free / 1e9
    writable = os.access(folder, os.W_OK)
    return [
        Finding("ok" if free >= DISK_GB else "note", "disk", f"{free:.0f} GB free for {home}"),
        Finding("ok" if writable else "fail", "home", f"{home}" if writable else f"{folder} can't be written to"),
    ]


def _store(home: Path) -> Finding:
    """Where the store is, and whether a file can be written there."""
    try:
        place = ArtifactStore(home).place
        if place.where == str(home / "store"):
            return Finding("ok", "store", f"{place.where} (TETHER_STORE names another)")
        probe = f"locks/doctor-{uuid.uuid4().hex}"
        place.create(probe, b"")
        place.remove(probe)
    except (TetherError, OSError) as error:
        return Finding("fail", "store", f"can't be written: {error}")
    return Finding("ok", "store", f"{place.where} can be written")


def _versions() -> list[Finding]:
    if not CONSTRAINTS.is_file():
        return [Finding("note", "versions", f"no {CONSTRAINTS} to compare with")]
    lines = CONSTRAINTS.read_text().splitlines()
    wanted = dict(line.split("==", 1) for line in lines if "==" in line and not line.startswith("#"))
    different, absent = [], []
    for name, version in wanted.items():
        try:
            installed = importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            absent.append(name)
            continue
        if installed != version.partition("+")[0]:
            different.append(f"{name} {installed} (tested: {version})")
    if not different and not absent:
        return [Finding("ok", "versions", f"all {len(wanted)} as in infra/constraints.txt")]
    lacking = f"; not installed: {', '.join(absent[:8])}" if absent else ""
    return [Finding("note", "versions", f"{', '.join(different[:8]) or 'none differs'}{lacking}")]


def breaking() -> list[Finding]:
    """Installed versions that are known to break something, and what."""
    found = []
    for name, first, what in BREAKING:
        installed = importlib.metadata.version(name)
        if Version(installed) >= Version(first):
            text = f"{installed}: with {first} and later {what}. pip install '{name}<{first}', or `make install`"
            found.append(Finding("fail", name, text))
    return found or [
        Finding("ok", "Prefect's needs", ", ".join(f"{name} below {first}" for name, first, _ in BREAKING))
    ]


def _servers() -> list[Finding]:
    found = []
    for name, variable, without in (
        ("MLflow", "MLFLOW_TRACKING_URI", "SQLite and a folder in the home"),
        ("Prefect", "PREFECT_API_URL", "embedded in each run"),
    ):
        url = os.environ.get(variable, "")
        shown = redacted(url)
        if not url.startswith("http"):
            found.append(Finding("ok", name, shown or without))
        elif no_answer(f"{url.rstrip('/')}/health") is None:
            found.append(Finding("ok", name, f"{shown} answers"))
        else:
            found.append(Finding("fail", name, f"{shown} does not answer; start it, or unset {variable}"))
    return found


def _packages() -> Finding:
    return Finding("ok", "packages", f"all four from {Path(__file__).resolve().parent.parent}")


def _models(home: Path) -> list[Finding]:
    return [
        Finding("ok", name, str(model_folder(name, home)))
        if (model_folder(name, home) / model.file).is_file()
        else Finding("note", name, f"not fetched (`tether fetch {name}`); only the hh-smollm2 profile needs it")
        for name, model in MODELS.items()
    ]
