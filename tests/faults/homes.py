"""What the fault tests share: runs with a fault planted, homes to run them in, and the rules that a home must keep."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("run", "tiny")
STAGES = ("validate", "sft", "reward", "ppo", "human_eval")

HASH = "[0-9a-f]{64}"
RULES = [
    re.compile(rule)
    for rule in (
        rf"store/objects/{HASH}",
        rf"store/records/{HASH}/\d+\.[a-z_.]+\.json",
        r"store/\.(views\.)?lock",
        rf"work/{HASH}\.lock",
        r"runs/[\w-]+/(run\.json|config\.yaml|report\.(md|html)|cards/[\w-]+\.md|mlflow\.(json|lock)|metrics/\w+\.jsonl"
        r"|samples/\w+\.txt|done/[\w.]+\.json)",
    )
]
"""Every file below store/, work/ and runs/ of a home in which nothing runs; views hold links alone."""


SAID = "said"
"""The file beside the undisturbed home with what its run printed."""

NOT_SYNCED = "not_synced"
"""The file beside the undisturbed home that says what got a name in it before it was on the disk."""

Moment = tuple[str, str, int]
"""Stage, phase, and how manieth of these."""


@dataclass
class Done:
    """How a command ended."""

    code: int
    output: str
    """What it printed, both streams."""
    seconds: float
    happened: bool
    """The fault that was planted."""


@dataclass
class Home:
    """A `TETHER_HOME` with the same command run in it again and again."""

    path: Path
    environment: dict[str, str] = field(default_factory=dict)

    def tether(self, *arguments: str, plan: dict[str, Any] | None = None) -> Done:
        """`tether ARGUMENTS` (the run, if none are given), with the fault that `plan` says."""
        happened = self.path.with_name(f"{self.path.name}.happened")
        happened.unlink(missing_ok=True)
        plan = {**(plan or {}), "happened": str(happened)}
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
        variables = {**given, "TETHER_HOME": str(self.path), "COLUMNS": "160", **self.environment}
        script = [sys.executable, str(ROOT / "tests/faults/inject.py"), json.dumps(plan)]
        began = time.monotonic()
        # Not through pipes: the embedded Prefect server of a killed run would hold them open.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [*script, *(arguments or COMMAND)], cwd=self.path.parent, env=variables, stdout=output, stderr=output,
                check=False, timeout=PATIENCE * 450,
            )  # fmt: skip
            output.seek(0)
            return Done(done.returncode, output.read(), time.monotonic() - began, happened.exists())

    def status(self) -> dict[str, Any]:
        """The newest run's."""
        runs = [json.loads(path.read_text()) for path in self.path.glob("runs/*/run.json")]
        return max(runs, key=lambda run: run["started"])

    def digests(self) -> dict[str, str]:
        """Of the newest run's stages."""
        return {stage["name"]: stage["digest"] for stage in self.status()["stages"]}

    def keys(self, *stages: str) -> set[str]:
        """Keys of the records of `stages`, sub-stages included."""
        found = set()
        for path in self.path.glob("store/records/*/1.*.json"):
            if json.loads(path.read_text())["record"]["stage"].split(".")[0] in stages:
                found.add(path.parent.name)
        return found

    def before(self, stage: str, folder: Path) -> "Home":
        """A copy of this home in `folder` in which `stage` and what follows have not been computed."""
        home = self.copy(folder)
        shutil.rmtree(folder / "runs")
        shutil.rmtree(folder / "store" / "views")
        for key in home.keys(*STAGES[STAGES.index(stage) :]):
            shutil.rmtree(folder / "store" / "records" / key)
        return home

    def copy(self, folder: Path) -> "Home":
        """A copy of this home in `folder`."""
        shutil.copytree(self.path, folder, symlinks=True)
        home = Home(folder, dict(self.environment))
        places = {"experiments": "artifact_location", "runs": "artifact_uri", "logged_models": "artifact_location"}
        with closing(sqlite3.connect(folder / "mlflow.db")) as database, database:
            for table, column in places.items():  # else MLflow would go on in the files of the home that was copied
                change = f"update {table} set {column} = replace({column}, ?, ?)"
                changed = database.execute(change, (f"{self.path.as_uri()}/", f"{folder.as_uri()}/"))
                elsewhere = f"select count(*) from {table} where instr({column}, ?) = 0 and {column} like 'file:%'"
                assert changed.rowcount and database.execute(elsewhere, (folder.as_uri(),)).fetchone() == (0,), table
        return home

    def check(self) -> None:
        """Nothing below is outside the store's rules, every object is what its name says, no key has two records."""
        for path in sorted(p for top in ("store", "work", "runs") for p in (self.path / top).rglob("*")):
            name = path.relative_to(self.path).as_posix()
            if path.is_symlink():
                assert name.startswith("store/views/") and (self.path / "store/objects") in path.resolve().parents, name
            elif path.is_file():
                assert any(rule.fullmatch(name) for rule in RULES), f"{name} should not be there"
        for path in (self.path / "store" / "objects").iterdir():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
        for folder in (self.path / "store" / "records").iterdir():
            assert len(list(folder.iterdir())) == 1, f"{folder.name} was computed twice"


def tail(done: Done) -> str:
    """What a failing test shows of a command."""
    return f"exit code {done.code}\n{done.output[-3000:]}"


def undisturbed(folder: Path, environment: dict[str, str]) -> tuple[Home, list[Moment]]:
    """The home in `folder` with a run in which nothing happens, and the run's moments; the first caller computes it.

    That run starts a Prefect server of its own, in a folder whose name has a space; what is run in copies of the home
    has `environment`.
    """
    folder.mkdir(exist_ok=True)
    home, trace = Home(folder / "the home"), folder / "trace.jsonl"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not trace.exists():
            unfinished = folder / "trace.unfinished"
            unfinished.unlink(missing_ok=True)
            shutil.rmtree(home.path, ignore_errors=True)
            done = home.tether(plan={"trace": str(unfinished), "synced": str(folder / NOT_SYNCED)})
            assert done.code == 0, tail(done)
            home.check()
            shutil.rmtree(home.path / "prefect", ignore_errors=True)  # no copy needs it
            (folder / SAID).write_text(done.output)
            unfinished.rename(trace)
    home.environment = environment
    moments = [json.loads(line)[:3] for line in trace.read_text().splitlines()]
    return home, [(stage, phase, nth) for stage, phase, nth in moments]
