"""Check what a run can use on this machine, and its servers: one finding per line, each with what to do."""

import importlib.metadata
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from components.base.errors import TetherError, UserError
from components.base.redaction import redacted
from components.base.text import counted, plain
from components.keys.plugins import GROUPS, installed_plugins
from components.models.runtime import Runtime, usable_gpus
from components.rollouts.client import VllmClient, resolve_engine, resolve_rollout
from components.rollouts.config import RolloutConfig
from components.store.store import ArtifactStore
from flows.config.run_config import RunConfig
from tasks.prefect_flow.server import check_server, is_untrusted, no_answer
from tasks.runs.schema import check_home
from tasks.tracking.database import is_outdated
from tasks.tracking.mlflow_client import connect, in_short

CONSTRAINTS = Path(__file__).resolve().parent.parent / "infra" / "constraints.txt"
DISK_GB = 5.0

CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PREFECT_API_SSL_CERT_FILE", "MLFLOW_TRACKING_SERVER_CERT_PATH")

Level = Literal["ok", "note", "fail"]


class Finding(NamedTuple):
    """The result of one check."""

    level: Level
    what: str
    text: str
    exit_code: int = 1
    """The exit code of `tether doctor` if this check fails: 2 if only the user can fix it, for example a wrong
    password."""


def diagnose(home: Path, config: RunConfig | None = None) -> list[Finding]:
    """Return the results of all checks of `tether doctor`; of `config` it checks the server that samples rollouts."""
    return [
        *_torch(),
        *_runtime(),
        _disk(home),
        _store(home),
        *_home(home),
        _versions(),
        *servers(home),
        *_rollout_server(config),
        *_plugins(),
    ]


def print_findings(findings: Sequence[Finding]) -> int:
    """Print the findings and return the exit code: 0 if no check failed."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    for level, what, text, _ in findings:
        table.add_row(Text(level, {"ok": "green", "note": "yellow", "fail": "red"}[level]), what, Text(plain(text)))
    Console().print(table)
    return max((finding.exit_code for finding in findings if finding.level == "fail"), default=0)


def _torch() -> list[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return [Finding("fail", "torch", f"does not import: {error}. Run `make install`.")]
    findings = [Finding("ok", "torch", f"{torch.__version__}, {torch.get_num_threads()} threads by default")]
    here = usable_gpus()
    if not here.gpus:
        findings.append(Finding("note", "GPU", f"none; everything runs on the CPU ({here.why})"))
    elif torch.cuda.is_available():
        gpus = ", ".join(gpu.name for gpu in here.gpus)
        findings.append(Finding("ok", "GPU", f"{gpus}; CUDA {here.cuda} ({here.why})"))
    else:
        problem = f"{here.why}, but this torch can't use it: update the driver, or set runtime.device=cpu"
        findings.append(Finding("fail", "GPU", problem))
    return findings


def _runtime() -> list[Finding]:
    here = Runtime().resolve()
    processes, threads = counted(int(here.ranks), "process", "processes"), counted(here.threads, "thread")
    why = "one for each GPU" if here.device == "cuda" else "set runtime.ranks for more"
    return [
        Finding("ok", "a run here", f"runtime: {{{here.setting}}} (part of every key)"),
        Finding("ok", "ranks", f"sft, reward and ppo train in {processes} ({why}), with {threads} each"),
    ]


def _disk(home: Path) -> Finding:
    folder = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(folder).free / 1e9
    return Finding("ok" if free >= DISK_GB else "note", "disk", f"{free:.0f} GB free for {home}")


def _store(home: Path) -> Finding:
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


def _home(home: Path) -> list[Finding]:
    try:
        check_home(home)
    except UserError as error:
        return [Finding("fail", "home", str(error), 2)]
    database = home / "mlflow.db"
    if not database.is_file() or not database.stat().st_size or not is_outdated(database):
        return []
    text = "tables of an earlier version: `tether upgrade` is due, after a `tether backup`"
    return [Finding("note", database.name, text)]


def _versions() -> Finding:
    if not CONSTRAINTS.is_file():
        return Finding("note", "versions", f"no {CONSTRAINTS} to compare with")
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
        return Finding("ok", "versions", f"all {len(wanted)} as in infra/constraints.txt")
    lacking = f"; not installed: {', '.join(absent[:8])}" if absent else ""
    return Finding("note", "versions", f"{', '.join(different[:8]) or 'all installed ones as tested'}{lacking}")


def servers(home: Path) -> list[Finding]:
    """Check certificate files, and whether the MLflow and Prefect servers answer and accept our credentials; unset
    servers are not checked."""
    return [
        *_certificates(),
        _server("MLflow", "MLFLOW_TRACKING_URI", "SQLite and a folder in the home", lambda: connect(home)),
        _server("Prefect", "PREFECT_API_URL", "embedded in each run", check_server),
    ]


def _server(name: str, variable: str, without: str, ask: Callable[[], object]) -> Finding:
    """Check one server. `ask` makes a call that needs credentials."""
    url = os.environ.get(variable, "")
    address = redacted(url)
    if not url.startswith("http"):
        return Finding("ok", name, address or without)
    error = no_answer(f"{url.rstrip('/')}/health")
    if error is not None and not is_untrusted(error):
        return Finding("fail", name, f"{address} does not answer; start it, or unset {variable}")
    try:
        ask()
    except TetherError as refused:
        return Finding("fail", name, str(refused), refused.exit_code)
    except Exception as broken:  # MLflow's client can raise any exception
        return Finding("fail", name, f"{address} does not answer: {in_short(broken)}")
    return Finding("ok", name, f"{address} answers, and accepts the credentials")


def _rollout_server(config: RunConfig | None) -> list[Finding]:
    """Check a vLLM server as PPO does when it begins: that of the config, or of TETHER_VLLM_URL."""
    rollout = resolve_engine(RolloutConfig(engine="auto") if config is None else config.ppo.rollout)
    if not rollout.by_server:
        return []
    rollout = rollout.model_copy(update={"timeout": min(rollout.timeout, 30.0), "retries": 0})
    try:
        with VllmClient(resolve_rollout(rollout)) as client:
            facts = client.check(None if config is None else config.generation)
    except TetherError as error:
        return [Finding("fail", "vLLM", str(error), error.exit_code)]
    invariant = "batch-invariant" if facts.batch_invariant else "not batch-invariant, so PPO will not be bit-exact"
    text = f"{redacted(client.url)} answers: {facts.version}, {facts.dtype}, {invariant}"
    return [Finding("note", "vLLM", f"{text}. {facts.untried}") if facts.untried else Finding("ok", "vLLM", text)]


def _certificates() -> list[Finding]:
    named = {name: os.environ[name] for name in CERTIFICATES if os.environ.get(name)}
    return [
        Finding("fail", "certificates", f"{name} = {path}: no such file. Set it to a CA's certificate, or unset it.", 2)
        for name, path in named.items()
        if not Path(path).exists()
    ]


def _plugins() -> list[Finding]:
    findings = []
    for group in GROUPS:
        try:
            names = [f"{plugin.name} ({plugin.label})" for plugin in installed_plugins(group).values()]
        except UserError as error:
            findings.append(Finding("fail", "plug-ins", str(error), 2))
            continue
        if names:
            findings.append(Finding("ok", "plug-ins", f"{group.partition('.')[2]}: {', '.join(names)}"))
    return findings
