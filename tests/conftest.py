"""The real command line in a process of its own."""

import collections
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings
from typer.testing import CliRunner

from tests.faults import sample
from tests.faults.homes import Home, Moment, undisturbed
from tests.servers import PrefectServer

ROOT = Path(__file__).resolve().parent.parent

# Tests run beside each other: the threads of the commands that they start sleep while they wait.
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# The shapes that components/ppo/maths.py states are checked at every call, under pytest only. It stands here because no
# test module may import that file before.
jaxtyping.install_import_hook(["components.ppo.maths", "components.training.terms"], "beartype.beartype").__enter__()

# The same examples every time, and no clock: these machines are shared.
settings.register_profile("shared", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fuzz", max_examples=5000, deadline=None)
settings.load_profile("shared")

DURATIONS = ROOT / "tests/durations.json"
"""Seconds that the tests of a file took, with TETHER_DURATIONS=store; a file that is not in it comes last."""

Tether = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure() -> None:
    """Take SIGHUP as a terminal gives it: under nohup it is ignored, and what tests start would inherit that.

    While tests are collected no cycles are looked for: that took a third of the time.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for cycles again, but not among what was imported, which stays until the end."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files, the longest first, so that no worker is left alone with it at the end; tests of a file stay
    together and in their order. Leave out what a sample does not have.

    It comes last, after the tests whose markers were not asked for have gone.
    """
    durations = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: -durations.get(item.path.relative_to(ROOT).as_posix(), 0))
    left_out = set[pytest.Item]()
    if sample.SAMPLE:
        faults = [item for item in items if item.get_closest_marker("faults")]
        left_out |= set(faults) - sample.chosen(faults, sample.SAMPLE)
    if sample.CORE:
        left_out |= set(items) - sample.half_of_the_files(items, sample.CORE)
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def pytest_report_header() -> list[str]:
    """What repeats this choice of tests and moments."""
    core = [f"TETHER_CORE_SAMPLE={sample.CORE}"] if sample.CORE else []
    return [f"TETHER_FAULTS_{'SAMPLE' if sample.SAMPLE else 'SEED'}={sample.SEED}", *core]


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what came of each fault, and store how long the files took, if that is asked for."""
    sample.show(terminalreporter.stats.get("passed", []))
    if os.environ.get("TETHER_DURATIONS") == "store":
        seconds = collections.Counter[str]()
        for report in itertools.chain(*map(terminalreporter.getreports, ("passed", "failed", ""))):
            seconds[report.nodeid.partition("::")[0]] += report.duration
        durations = json.loads(DURATIONS.read_text()) | {name: round(each, 1) for name, each in seconds.items()}
        ours = {name: each for name, each in sorted(durations.items()) if (ROOT / name).exists() and each >= 1}
        DURATIONS.write_text(json.dumps(ours, indent=1) + "\n")


def _call(home: Path, python: tuple[str, ...], arguments: tuple[str, ...], changes: dict[str, str]) -> dict[str, Any]:
    """What `subprocess` needs to run the console script's code."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    variables = {**kept, "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "160", **changes}
    return {"args": [sys.executable, *python, "-m", "flows.cli", *arguments], "env": variables, "text": True}


@pytest.fixture(scope="module", autouse=True)
def server_of_events() -> Iterator[None]:
    """Send the events of a file's tests to its own server: Prefect keeps one worker a process, with its first server.

    An earlier file's server has ended by then.
    """
    worker = sys.modules.get("prefect.events.worker")
    if worker:
        worker.EventsWorker.drain_all(timeout=10)
    yield


@pytest.fixture(scope="session")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a command that uses a Prefect server of the tests: an embedded one takes 13 s a command."""
    server = PrefectServer(tmp_path_factory.mktemp("prefect")).start()
    try:
        yield {"PREFECT_API_URL": server.api}
    finally:
        server.stop()


@pytest.fixture(scope="session")
def whole(prefect: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, list[Moment]]:
    """A home with an undisturbed run of `tiny`, and the run's moments. Read it, copy it; don't change it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # that of all workers: the first one computes it, the others wait
    return undisturbed(folder / "whole", prefect)


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MLflow's database without anything in it: making one takes seconds."""
    from tasks.tracking.mlflow_client import connect

    home = tmp_path_factory.mktemp("empty")
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        connect(home)
    return home / "mlflow.db"


@pytest.fixture(scope="session")
def tether(request: pytest.FixtureRequest) -> Tether:
    """`tether(*arguments, home=..., cwd=..., python=(...), **environment)` runs the console script's code.

    With `embedded=True` as on a machine without a Prefect server; else what needs one uses that of the tests.
    """

    def run(
        *arguments: str, home: Path, cwd: Path | None = None, python: tuple[str, ...] = (), embedded: bool = False,
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:  # fmt: skip
        if not embedded and arguments[0] in ("run", "rerun", "sweep", "people"):
            environment = {**request.getfixturevalue("prefect"), **environment}
        call = _call(home, python, arguments, environment)
        return subprocess.run(**call, cwd=cwd or home.parent, capture_output=True, check=False, timeout=1080)

    return run


@pytest.fixture(scope="session")
def tether_here() -> Tether:
    """The same in pytest's own process, which has imported already what a new one would: for what runs no stage."""

    def run(
        *arguments: str, home: Path, cwd: Path | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        from flows.cli.__main__ import app

        before, changes = dict(os.environ), _call(home, (), (), environment)["env"]
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(cwd or home.parent)
            try:
                os.environ.clear()
                os.environ.update(changes)
                done = CliRunner().invoke(app, list(arguments), prog_name="tether", catch_exceptions=False)
            finally:  # a command sets variables for MLflow and Prefect
                os.environ.clear()
                os.environ.update(before)
        return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)

    return run


@pytest.fixture
def start_tether() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`start_tether(*arguments, home=...)` starts the same in a session of its own, as a shell does, for signals.

    Its stdout holds both streams, unless `stderr` says where the other goes; it ignores the signals `ignored`.
    """
    started: list[subprocess.Popen[str]] = []

    def start(
        *arguments: str, home: Path, stderr: int = subprocess.STDOUT, ignored: Sequence[int] = (), **environment: str
    ) -> subprocess.Popen[str]:
        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell in the background has its children ignore it
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        call = _call(home, (), arguments, environment)
        started.append(subprocess.Popen(
            **call, cwd=home.parent, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True, preexec_fn=prepare
        ))  # fmt: skip
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
