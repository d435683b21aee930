"""What the benches share: command line, tables, limits, runs that are kept, and measurements in their own processes."""

import argparse
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows, write_json
from components.store.store import ArtifactStore
from tests.bench.policies.thresholds import settings

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(".tether/bench/real")
"""The home of runs on real data, which share the data, the SFT policy and reward models."""


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    return "\n".join([
        f"| {' | '.join(titles)} |", "|" + "---|" * len(titles), *(f"| {' | '.join(map(str, row))} |" for row in rows)
    ])  # fmt: skip


def bar(value: float, limit: float | None, largest: bool = False) -> str:
    """Return a value beside the limit that it is to reach, or not to pass where that is the `largest` allowed."""
    if limit is None:
        return f"{value:.2f}"
    sign, met = ("≤", value <= limit) if largest else ("≥", value >= limit)
    return f"{value:.2f} ({sign} {limit:g} {'met' if met else 'MISSED'})"


def measured(module: str, given: dict[str, Any], threads: int, trl: Path | None = None) -> Any:
    """Return what a module prints as its last line, given a JSON object as its argument, in a process of its own.

    The environment is the same for all sides of a comparison.

    Args:
        given: its `side` and `dtype` are used here too.
        trl: the folder TRL was installed into, for TRL's side alone.
    """
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(trl or ""), os.environ.get("PYTHONPATH")])),
        "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000", "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "ACCELERATE_MIXED_PRECISION": "bf16" if given.get("dtype") == "bfloat16" else "no",
    }  # fmt: skip
    command = [sys.executable, "-m", module, json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{module}, {given}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def require_trl(folder: Path, version: str = "1.12.0") -> None:
    """Say how to get TRL where this version isn't in `folder`.

    Raises:
        SystemExit: it isn't.
    """
    if not (folder / f"trl-{version}.dist-info").is_dir():
        raise SystemExit(f"no TRL {version} in {folder}: pip install --no-deps --target {folder} trl=={version}")


def memory(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process in bytes."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match
    return int(match[1]) * 1024


def seed_range(text: str) -> list[int]:
    """Return the seeds of `10-19`, `3` or `0-4,8`.

    Raises:
        ValueError: it is none of these.
    """
    seeds: list[int] = []
    for part in text.split(","):
        if (ends := re.fullmatch(r"(\d+)(?:-(\d+))?", part)) is None:
            raise ValueError(f"{text!r} is no range of seeds; give 10-19, 3 or 0-4,8")
        seeds += range(int(ends[1]), int(ends[2] or ends[1]) + 1)
    if len(set(seeds)) < len(seeds) or not seeds:
        raise ValueError(f"{text!r} names no seed, or one twice")
    return seeds


def tether(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in this interpreter's environment."""
    environment = os.environ | {"TETHER_HOME": str(home)}
    command = [sys.executable, "-m", "flows.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def run_with(home: Path, profile: str, options: Sequence[str], codes: Sequence[int]) -> dict[str, Any]:
    """Run a profile with options as of `--set`; returns the run's status.

    Raises:
        SystemExit: it ended with an exit code that is none of `codes`.
    """
    home.mkdir(parents=True, exist_ok=True)
    done = tether(home, "run", profile, *(part for option in options for part in ("--set", option)))
    if done.returncode not in codes:
        raise SystemExit(f"{home}, {profile} {list(options)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return {**json.loads(tether(home, "status", "--json").stdout), "exit_code": done.returncode}


def with_models(home: Path) -> Path:
    """Return the absolute path of a bench's home, which is made; it finds the models that `tether fetch` fetched."""
    home = home.resolve()
    home.mkdir(parents=True, exist_ok=True)
    fetched = Path(os.environ.get("TETHER_HOME", ".tether")).resolve() / "models"
    if not (home / "models").exists() and fetched.is_dir():
        (home / "models").symlink_to(fetched)
    return home


def policy_of_run(home: Path, name: str, profile: str, given: Sequence[str]) -> dict[str, Any]:
    """Return `metrics`, `history` and the held-out `evaluations` of the policy of a run with every gate off.

    It is kept in the home as `name`.json, and not run again.

    Args:
        given: options as of `--set`.
    """
    kept = home / f"{name}.json"
    if not kept.exists():
        stages = run_with(home, profile, [*given, *settings("ppo")], [3])["stages"]
        stage = next(stage for stage in stages if stage["name"] == "ppo")
        folder = ArtifactStore(home).path(stage["digest"])
        evaluations = json.loads((folder / "metadata.json").read_text())["evaluations"]
        history = list(read_rows(folder / "history.jsonl"))
        write_json(kept, {"metrics": stage["metrics"], "history": history, "evaluations": evaluations})
    return dict(json.loads(kept.read_text()))


def metric(status: dict[str, Any], stage: str, name: str) -> float:
    """Return a stage's final metric, NaN where the stage didn't run."""
    return next((s["metrics"].get(name, math.nan) for s in status["stages"] if s["name"] == stage), math.nan)
