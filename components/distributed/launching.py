"""Start a stage's ranks, follow them, stop them, and end them. Importable without torch."""

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from components.base.errors import TetherError
from components.base.observe import Observe
from components.base.process import is_alive
from components.base.settings import Settings
from components.base.text import plain
from components.distributed import agent, entry, outcome
from components.distributed.hosts import these_hosts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1
GRACE_SECONDS = 15.0
"""Seconds after a rank's failure before the other ranks are killed."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Program:
    """What each rank runs, by name (`module:what`), so that nothing is pickled."""

    run: str
    """The stage's function, `(job, inputs, out, observe) -> metrics`."""
    job: str
    """The class of its config."""
    setup: str
    """The function that is called first, with the config's runtime."""
    within: str
    """Returns the context in which a rank computes. Within it, a stop signal raises or waits for a step's end."""


class Stopped(Exception):
    """The ranks were told to stop by signal `number`, and have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass
class _Ranks:
    """The ranks of this host, identified by their files in `folder`."""

    folder: Path
    agent: subprocess.Popen[bytes]
    name: str
    stop_signal: int | None = None
    _stopped: set[int] = field(default_factory=set, init=False)
    _read: int = field(default=0, init=False)
    _failing: float | None = field(default=None, init=False)
    _silent: list[int] = field(default_factory=list, init=False)
    """The ranks that had ended without an error when the first failure was seen."""

    def observed(self) -> Iterator[dict[str, object]]:
        path = self.folder / entry.OBSERVED
        if path.is_file():
            with path.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    yield json.loads(line)

    def processes(self) -> dict[int, dict[str, object]]:
        """Return the processes of the ranks that have begun, by rank number."""
        by_rank = {}
        for path in self.folder.glob("process-*.json"):
            with contextlib.suppress(ValueError):  # being written
                by_rank[int(path.stem.partition("-")[2])] = json.loads(path.read_text(encoding="utf-8"))
        return by_rank

    def stop(self, number: int) -> None:
        """Signal each rank once to stop: each finishes its step, then all end together.

        Another call reaches ranks that have begun since. If none has begun, since other hosts are missing or torch is
        being imported, the agent is killed: nothing is lost.
        """
        self.stop_signal = self.stop_signal or number
        begun = self.processes()
        if not begun:
            self.kill()
        for rank, process in begun.items():
            if rank not in self._stopped and is_alive(process):  # type: ignore[arg-type]
                self._stopped.add(rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(str(process["pid"])), self.stop_signal)

    def kill_if_stuck(self) -> None:
        """Kill all ranks some time after one has failed, since the others may wait for it in code that no signal
        ends."""
        gone = [r for r, process in self.processes().items() if not is_alive(process)]  # type: ignore[arg-type]
        died = [rank for rank in gone if not entry.done_file(self.folder, rank).exists()]
        ended = outcome.read_ended(self.folder)
        if self._failing is None and (died or any(not ending.signal for ending in ended)):
            self._failing, reported = time.monotonic(), {ending.rank for ending in ended}
            self._silent = [rank for rank in died if rank not in reported]
        if self._failing is not None and time.monotonic() - self._failing > GRACE_SECONDS:
            self.kill()

    def kill(self) -> None:
        """Kill the agent, upon which the kernel kills the ranks; return when they are gone."""
        self.agent.kill()
        self.agent.wait()
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(is_alive(process) for process in self.processes().values()):  # type: ignore[arg-type]
            time.sleep(0.01)

    def metrics(self) -> dict[str, float]:
        """Return the stage's metrics, once the agent has ended.

        Raises:
            Stopped: a rank was told to stop.
            Exception: the error of the rank that failed first.
        """
        if self.agent.returncode == 0 and (self.folder / entry.METRICS).is_file():
            return json.loads((self.folder / entry.METRICS).read_text(encoding="utf-8"))
        ended = outcome.read_ended(self.folder)
        path = self.folder / agent.DIED
        died = {int(r): code for r, code in json.loads(path.read_text()).items()} if path.is_file() else {}
        failed = any(not ending.of_ranks and not ending.signal for ending in ended)
        number = outcome.told_to_stop(ended, died) or (0 if failed else self.stop_signal)
        if number:
            raise Stopped(number)
        if ended or died or self.processes():
            raise outcome.error_of(self.name, ended, died, self._silent)
        raise TetherError(f"{self.name}: its ranks could not be started: {self._last_line()}")

    def _last_line(self) -> str:
        text = (self.folder / "agent.log").read_text(encoding="utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else f"the agent ended with exit code {self.agent.returncode}"


def launch(
    program: Program, name: str, job: Settings, inputs: Mapping[str, Path], out: Path, observe: Observe,
    ranks: int, timeout: float, check: Callable[[], int | None] = lambda: None,
) -> dict[str, float]:  # fmt: skip
    """Compute a stage in `ranks` processes, on this host and the others of `these_hosts`; return its metrics.

    Args:
        name: the stage's name, for messages.
        out: the folder in which the ranks compute; their own files are in `out`/ranks.
        observe: called in this process with what rank 0 observes.
        timeout: seconds that a rank waits for the others.
        check: called ten times per second; returns the signal that told this process to stop, or None. If it raises,
            the ranks are killed.

    Raises:
        Stopped: this process or a rank was told to stop; the ranks have finished their step and written a checkpoint.
        WorkerDied: a rank was killed or did not answer.
        Exception: the error that a rank raised.
    """
    folder = out / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = {name: str(path.absolute()) for name, path in inputs.items()}
    values = {"values": job.model_dump(mode="json"), "inputs": paths, "out": str(out.absolute())}
    (folder / entry.PROGRAM).write_text(json.dumps(asdict(program) | values), encoding="utf-8")
    started = _Ranks(folder, start_agent(folder, ranks, program.within, timeout), name)
    try:
        _follow(started, observe, check)
        return started.metrics()
    finally:
        _leave(started)


def join(within: str, ranks: int, folder: Path, timeout: float, check: Callable[[], int | None]) -> int:
    """Compute this host's share of the stage that the first host computes; return the exit code.

    Args:
        ranks: number of ranks on all hosts together.
        folder: the folder for the files of this host's ranks.
    """
    started = _Ranks(folder, start_agent(folder, ranks, within, timeout), f"host {these_hosts().number}")
    try:
        _follow(started, lambda *_, **__: None, check)
        if (code := started.agent.returncode) != 0:
            logger.warning("the ranks of this host ended with exit code %d: %s", code, started._last_line())
        return code
    finally:
        _leave(started)


def _follow(started: _Ranks, observe: Observe, check: Callable[[], int | None]) -> None:
    """Wait until the ranks end, and pass on what they observe."""
    over = False
    while not over:
        over = started.agent.poll() is not None
        number = check()
        if number is not None:
            started.stop(number)
        for row in started.observed():
            observe(**row)  # type: ignore[arg-type]
        if not over:
            started.kill_if_stuck()
            time.sleep(POLL_SECONDS)


def _leave(started: _Ranks) -> None:
    if started.agent.poll() is None:
        started.kill()
    relay(started.folder)


def start_agent(folder: Path, ranks: int, within: str, timeout: float) -> subprocess.Popen[bytes]:
    """Start the agent of `folder` in a separate session, which the terminal's Ctrl-C does not reach."""
    hosts = these_hosts()
    wanted = {"ranks_here": hosts.ranks_here(ranks), "hosts": asdict(hosts), "within": within}
    (folder / entry.AGENT).write_text(json.dumps(wanted), encoding="utf-8")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "agent.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "components.distributed.agent", str(folder), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, entry.TIMEOUT: str(timeout)},
        )


def relay(folder: Path) -> None:
    """Log what rank 0 wrote to standard error: warnings, and output of libraries."""
    for path in folder.glob("logs/**/0/stderr.log"):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip():
                logger.warning("%s", plain(line))
