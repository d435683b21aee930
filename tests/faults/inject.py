"""Runs the command line with one fault planted in it.

    python tests/faults/inject.py '{"stage": "ppo", "phase": "publish", "nth": 3, "fault": "kill"}' run tiny

Where: a change to the file system below TETHER_HOME, of which Python tells its audit hooks before it is made. Such a
moment is named by the stage that runs (as run.json says), by the phase (which folder is changed), and by its number
among these. MLflow is told by a thread that may be a stage behind: the moments of `record` are numbered from a stage's
beginning on, whichever runs by then. (It is a thread, and no process of its own, where MLflow is imported first: if
moments are counted, or the fault is in what it writes.) Nothing of ours is patched, and every write, rename and removal
is a moment.

What: `kill` (SIGKILL, `delay` seconds later; if `processes` names others, of those instead of this process),
`errno` (the change fails with `errno`; with `lasting` all later ones of its phase do too), or `clock` (the wall clock
jumps by `seconds`); the file `happened` is made then. Without a fault the moments are written to `trace`. In the file
`synced`, if named, `synced.py` writes what gets a name before it is on the disk.
"""

import atexit
import datetime
import json
import os
import signal
import sqlite3
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.faults.synced import Watch, writes

CHANGES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.truncate"}
PHASES = {
    ("work",): "write", ("store", "objects"): "publish", ("store", "records"): "commit", ("store", "views"): "view",
    ("runs",): "run", ("mlartifacts",): "record",
}  # fmt: skip

MLFLOW_WRITES = ("record", "run")
"""Phases in which the sender to MLflow changes files too."""


def phase_of(path: str, home: str) -> str | None:
    """What is done where `path` is changed; None for what isn't ours or isn't in a fixed order."""
    if not path.startswith(home + os.sep) or "cursor" in path:
        return None
    parts = Path(path).relative_to(home).parts
    if parts[0] == "work" and "checkpoint" in parts:
        return "checkpoint"
    if parts[0] == "runs" and "run.json" in parts[-1]:
        return "status"
    return next((name for prefix, name in PHASES.items() if parts[: len(prefix)] == prefix), None)


class Every(sqlite3.Connection):
    """A connection each of whose commits is a moment of `CommandHook`."""

    moment = staticmethod(lambda: None)

    def commit(self) -> None:
        self.moment()
        super().commit()


class CommandHook:
    """Kills a command that is no run before its `command`-th change below the home's parent, or commit to a database.

    Without a number the changes are counted, and their number is written to `trace` at the end.
    """

    def __init__(self, plan: dict[str, Any], home: str) -> None:
        self.plan, self.top, self.seen = plan, os.path.dirname(home), 0
        connect = sqlite3.connect
        sqlite3.dbapi2.connect = lambda *given, **options: connect(*given, **{"factory": Every, **options})
        Every.moment = self.moment  # type: ignore[assignment]
        sys.addaudithook(self)
        if "trace" in plan:
            atexit.register(lambda: Path(plan["trace"]).write_text(str(self.seen)))

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not writes(arguments):
            return
        path = os.path.abspath(os.fspath(arguments[0]))
        if path.startswith(self.top + os.sep) and path not in (self.plan.get("trace"), self.plan["happened"]):
            self.moment()

    def moment(self) -> None:
        self.seen += 1
        if self.seen == self.plan.get("command"):
            os.kill(os.getpid(), signal.SIGKILL)


class Hook:
    """Counts the moments, and acts at the one it waits for."""

    def __init__(self, plan: dict[str, Any], home: str) -> None:
        self.plan, self.home, self.begun = plan, home, [""]
        self.seen: Counter[tuple[str, str]] = Counter()
        self.acting = self.failing = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in CHANGES or self.acting or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        if event == "open" and not writes(arguments):
            return
        where = os.fspath(arguments[0])
        moved = event == "os.rename" and isinstance(arguments[1], str | os.PathLike)
        target = os.fspath(arguments[1]) if moved else where
        phase = phase_of(os.path.abspath(target), self.home)
        if phase is None:
            return
        if phase == "status" and moved:
            self._learn_stage(where)
        moments = []
        for stage in self.begun if phase == "record" else self.begun[-1:]:
            self.seen[stage, phase] += 1
            moments.append((stage, phase, self.seen[stage, phase]))
        if "trace" in self.plan:
            with open(self.plan["trace"], "a") as file:
                file.write(json.dumps([*moments[-1], event, target[len(self.home) :]]) + "\n")
        if self.failing and phase == self.plan["phase"]:
            raise self._error(target)
        if tuple(self.plan.get(name) for name in ("stage", "phase", "nth")) in moments:
            self._act(target)

    def _learn_stage(self, path: str) -> None:
        self.acting = True
        try:
            running = [s["name"] for s in json.loads(Path(path).read_text())["stages"] if s["state"] == "running"]
            if running and running[0] != self.begun[-1]:
                self.begun.append(running[0])
        finally:
            self.acting = False

    def _act(self, target: str) -> None:
        fault = self.plan.get("fault")
        if fault:
            Path(self.plan["happened"]).touch()
        if fault == "kill" and self.plan.get("delay"):
            timer = threading.Timer(self.plan["delay"], self._kill)
            timer.daemon = True
            timer.start()
        elif fault == "kill":
            self._kill()
        elif fault == "errno":
            self.failing = bool(self.plan.get("lasting"))
            raise self._error(target)
        elif fault == "clock":
            _jump(self.plan["seconds"])

    def _kill(self) -> None:
        for process in self._processes() if "processes" in self.plan else [os.getpid()]:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _processes(self) -> list[int]:
        """The processes that the plan names by id, or this process's children whose command has its text."""
        if not isinstance(self.plan["processes"], str):
            return self.plan["processes"]
        self.acting = True
        children = [child for child in psutil.Process().children() if self.plan["processes"] in str(child.cmdline())]
        self.acting = False
        assert children, f"nothing to kill with {self.plan['processes']}"
        return [child.pid for child in children]

    def _error(self, target: str) -> OSError:
        return OSError(self.plan["errno"], os.strerror(self.plan["errno"]), target)


def _jump(seconds: float) -> None:
    """From now on the wall clock is off by `seconds`; the monotonic one goes on as it must."""
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + seconds  # type: ignore[method-assign]
    time.time_ns = lambda: now_ns() + int(seconds * 1e9)  # type: ignore[method-assign]

    class Jumped(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return _Real.now(tz) + datetime.timedelta(seconds=seconds)

    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("tasks", "flows", "components", "data_contracts"):
            for key, value in vars(module).items():
                if value is _Real:
                    setattr(module, key, Jumped)


_Real = datetime.datetime


def main() -> None:
    """Plant the fault, then be `tether`."""
    plan = json.loads(sys.argv[1])
    sys.argv[1:] = sys.argv[2:]
    from flows.cli.__main__ import main as tether
    from tasks.tracking.mlflow_client import load_mlflow

    if plan.keys() & {"trace", "command"} or plan.get("phase") in MLFLOW_WRITES:
        load_mlflow()
    home = os.path.abspath(os.environ["TETHER_HOME"])
    if "synced" in plan:
        Watch(plan["synced"], home)
    if "command" in plan:
        CommandHook(plan, home)
    else:
        sys.addaudithook(Hook(plan, home))
    tether()


if __name__ == "__main__":
    main()
