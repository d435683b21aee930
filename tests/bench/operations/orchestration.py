"""What a run costs beyond its stages' functions, and where that goes: process, keys, Prefect, imports, MLflow, publish.

    python -m tests.bench.operations.orchestration demo
    python -m tests.bench.operations.orchestration tiny --twice      # and the same again, where every stage is a hit

The run is the command line's, in a process and a home of its own. Every moment of its main thread counts to the
innermost part that it is in; what other threads do meanwhile costs nothing and is listed apart.
"""

import argparse
import builtins
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.tools import ROOT, argument_parser, bar

SECONDS_BAR, HITS_BAR = 30.0, 10.0
"""Of a demo run's own cost; of a run in which every stage is a hit, in all."""

INSIDE = "inside the stages' functions"
START, END = "process start, imports of ours", "process end"
PREFECT, STARTED, TASKS = "embedded Prefect: process", "embedded Prefect: start", "embedded Prefect: tasks"
NEXT = {STARTED: "waiting for imports beside Prefect's start", TASKS: "embedded Prefect: end"}
"""What the flow goes on to after one of its parts."""
IMPORTS = {
    "great_expectations": "import of Great Expectations",
    "torch": "imports of torch and transformers",
    "transformers": "imports of torch and transformers",
    "prefect": "embedded Prefect: import",
    "mlflow": "MLflow",
    "matplotlib": "plots",
}
WRAPPED = (
    ("tasks.execution.runner", "key_of", "keys, look-ups, sources"),
    ("components.store.store:ArtifactStore", "lookup", "keys, look-ups, sources"),
    ("components.store.store:ArtifactStore", "path", "keys, look-ups, sources"),
    ("components.store.store:ArtifactStore", "publish", "publish"),
    ("flows.launch.begin", "find_sources", "keys, look-ups, sources"),
    ("tasks.prefect_flow.start_flow", "run_as_flow", PREFECT),
    ("tasks.prefect_flow.stage_tasks:Outcome", "capture", TASKS),
    ("flows.launch.begin", "write_reports", "report"),
    ("flows.reports.terminal", "print_run", "report"),
    ("tasks.execution.computing", "_plot", "plots"),
    ("tasks.execution.computing", "activate", "imports of torch and transformers"),
    ("tasks.execution.context:RunContext", "tracker", "MLflow"),
    ("tasks.execution.context:RunContext", "begin_stage", "MLflow"),
    ("tasks.execution.context:RunContext", "end_stage", "MLflow"),
    ("tasks.execution.context:RunContext", "finish", "MLflow"),
    ("tasks.runs.points:Spool", "close", "MLflow"),
    ("tasks.execution.runner", "_record", "MLflow"),
    ("tasks.execution.runner", "run_stage", "rest"),
    ("tasks.prefect_flow.server", "_wait_for", STARTED),
)
"""Where (`module` or `module:class`), what, and the part that it is."""


class Clock:
    """A thread's wall time by part: each moment counts to the part that was entered last and not yet left."""

    def __init__(self, part: str, began: float, now: Callable[[], float] = time.time) -> None:
        self.seconds: Counter[str] = Counter()
        self._parts, self._last, self._now = [part], began, now

    def enter(self, part: str) -> None:
        self._count()
        self._parts.append(part)

    def leave(self) -> None:
        self._count()
        self._parts.pop()

    def turn(self, part: str) -> None:
        """The present part is over, and another one in its place."""
        self._count()
        self._parts[-1] = part

    @property
    def part(self) -> str:
        return self._parts[-1]

    def _count(self) -> None:
        now = self._now()
        self.seconds[self.part] += now - self._last
        self._last = now


class Clocks(threading.local):
    """The main thread's clock, and one for each other thread from when it first does what is measured."""

    others: tuple[Clock, ...] = ()

    def __init__(self) -> None:
        self.clock = Clock("rest", time.time())
        if threading.current_thread() is not threading.main_thread():
            Clocks.others += (self.clock,)


def timed(clocks: Clocks, function: Callable[..., Any], part: str) -> Callable[..., Any]:
    """`function`, whose time counts to `part`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        clocks.clock.enter(part)
        try:
            return function(*args, **kwargs)
        finally:
            clocks.clock.leave()
            if part in NEXT:
                clocks.clock.turn(NEXT[part])

    return call


def measure_imports(clocks: Clocks) -> None:
    """Count a heavy library's first import to its part, all that it imports in turn included, in a stage too."""
    usual = builtins.__import__

    def measured(name: str, *args: Any, **kwargs: Any) -> Any:
        part = IMPORTS.get(name.partition(".")[0])
        if part is None or name in sys.modules or clocks.clock.part in IMPORTS.values():
            return usual(name, *args, **kwargs)
        return timed(clocks, usual, part)(name, *args, **kwargs)

    builtins.__import__ = measured  # type: ignore[assignment]


def measure_parts(clocks: Clocks) -> None:
    """Wrap what `WRAPPED` names, and the stages' functions."""
    import importlib

    from tasks.stages import Stage

    measure_imports(clocks)
    for where, name, part in WRAPPED:
        module, _, owner = where.partition(":")
        holder: Any = importlib.import_module(module)
        holder = getattr(holder, owner) if owner else holder
        setattr(holder, name, timed(clocks, getattr(holder, name), part))
    load = Stage.load_run
    Stage.load_run = lambda stage: timed(clocks, load(stage), INSIDE)  # type: ignore[method-assign]


def side(profile: str, began: float, out: Path) -> None:
    """`tether run PROFILE` in this process, measured from when it was started; writes what was found."""
    clocks = Clocks()
    clocks.clock = Clock(START, began)
    from flows.cli import __main__ as cli

    measure_parts(clocks)
    clocks.clock.turn("rest")
    try:
        sys.argv = ["tether", "run", profile]
        cli.main()
    finally:
        clocks.clock.turn(END)
        beside: Counter[str] = sum((each.seconds for each in Clocks.others), Counter())
        found = {"main": clocks.clock.seconds, "beside": beside, "ended": time.time()}
        out.write_text(json.dumps(found))


def measured_run(profile: str, home: Path) -> tuple[float, dict[str, float], dict[str, float]]:
    """Run `profile` in `home`: wall time, main thread's seconds by part, other threads' seconds by part."""
    out = home / "orchestration.json"
    home.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    environment = kept | {"TETHER_HOME": str(home), "PYTHONPATH": str(ROOT)}
    began = time.time()
    command = [sys.executable, "-m", "tests.bench.operations.orchestration", profile, "--side", str(began), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.time() - began
    if done.returncode:
        raise SystemExit(f"tether run {profile}: exit code {done.returncode}\n{done.stdout}{done.stderr[-3000:]}")
    found = json.loads(out.read_text())
    main = {**found["main"], END: began + wall - found["ended"]}
    return wall, main, {part: seconds for part, seconds in found["beside"].items() if part != "rest"}


def table(wall: float, main: dict[str, float], beside: dict[str, float]) -> str:
    """The parts by size, what they come to, and what was done beside them."""
    own = {part: seconds for part, seconds in main.items() if part != INSIDE}
    rows = [f"{'wall time':<48}{wall:8.1f} s", f"{INSIDE:<48}{main.get(INSIDE, 0.0):8.1f} s"]
    rows.append(f"{'orchestration':<48}{sum(own.values()):8.1f} s")
    rows += [f"  {part:<46}{own[part]:8.1f} s" for part in sorted(own, key=lambda part: -own[part])]
    rows += [f"  beside it: {part:<35}{beside[part]:8.1f} s" for part in sorted(beside, key=lambda part: -beside[part])]
    return "\n".join(rows)


def main() -> None:
    """Measure one run from nothing, and with --twice the same again."""
    parser = argument_parser(__doc__)
    parser.add_argument("profile")
    parser.add_argument("--twice", action="store_true", help="run it again where every stage is a hit")
    parser.add_argument("--side", nargs=2, metavar=("BEGAN", "OUT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        return side(options.profile, float(options.side[0]), Path(options.side[1]))
    with tempfile.TemporaryDirectory() as folder:
        found = [measured_run(options.profile, Path(folder) / "home") for _ in range(1 + options.twice)]
    print("\n\n".join(table(*each) for each in found))
    wall, main_thread, _ = found[0]
    own = wall - main_thread.get(INSIDE, 0.0)
    bars = [("orchestration", own, SECONDS_BAR), *(("every stage a hit", each[0], HITS_BAR) for each in found[1:])]
    for name, seconds, limit in bars:
        print(f"{name}, s: {bar(seconds, limit, largest=True)}")


if __name__ == "__main__":
    main()
