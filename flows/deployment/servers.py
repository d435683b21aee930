"""Servers and workers on this machine, as long as the command runs: the pages of MLflow and Prefect, and both pools.

Each part is started again by itself where it ends: the others, and what they compute, go on.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from components.base.errors import TetherError
from components.base.redaction import redacted
from components.training.stopping import graceful
from tasks.prefect_flow.server import PATIENCE, no_answer
from tasks.tracking.client import tracking_uri

START_SECONDS = 120.0
STOP_SECONDS = 30.0
AGAIN_SECONDS = (1.0, 60.0)
"""How long a part that ended waits to be started again: at first, doubled each time, and at most."""
STEADY_SECONDS = 60.0
"""A part that ran for so long waits as at first."""
LOOK_SECONDS = 0.5
WATCH_SECONDS = 10.0
CPU_RUNS = 2
"""Pipelines that a worker of the pool cpu runs at once; one that computes takes 1 GB and all cores."""

Say = Callable[[str], Any]


class Service(NamedTuple):
    """Something to start, and what a person is told of it."""

    name: str
    address: str
    command: list[str] | None
    """None where the user's own server is used."""
    health: str | None = None
    """Answers once it is up; None for what serves no page."""
    environment: Mapping[str, str] = MappingProxyType({})


def serve_pages(home: Path, say: Say) -> None:
    """Start MLflow's and Prefect's servers, say where they are, and end them with this process.

    Raises:
        TetherError: one does not come up.
    """
    _serve([_mlflow(home), _prefect()], home, say)


def serve_pools(home: Path, pools: Mapping[str, int], say: Say) -> None:
    """Start a worker for each pool, and end them with this process. Runs at work are told to stop, and can resume.

    Args:
        home: where their logs go.
        pools: how many runs of each pool are computed here at once.
        say: tells a person.
    """
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")  # workers of one pool, each with a GPU of its own
    from flows.deployment.alerts import DiskWatch
    from flows.deployment.recovery import resume_crashed

    workers = [
        Service(
            f"worker-{pool}" + (f"-{devices.replace(',', '-')}" if devices else ""),
            f"takes runs of pool {pool}, {limit} at a time",
            [
                sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process",
                "--limit", str(limit),
            ],
            environment={
                "PREFECT_LOGGING_LEVEL": "INFO",
                "PREFECT_WORKER_QUERY_SECONDS": "3",
                # With its database away, a server says 500; else a worker gives up after two minutes of that.
                "PREFECT_CLIENT_RETRY_EXTRA_CODES": PATIENCE["PREFECT_CLIENT_RETRY_EXTRA_CODES"],
            },
        )
        for pool, limit in pools.items()
    ]  # fmt: skip
    told: set[str] = set()
    disk = DiskWatch(home)

    def watch() -> None:
        disk.look()
        try:
            resume_crashed(pools, say)
        except Exception as error:  # the workers go on without retries
            if (text := f"Crashed runs are not tried again: {error}") not in told:
                told.add(text)
                say(text)

    _serve(workers, home, say, watch)


def free_port(preferred: int) -> int:
    """`preferred` if nothing listens there on loopback, else a free one."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    raise TetherError("no free port on 127.0.0.1")


def _mlflow(home: Path) -> Service:
    uri = tracking_uri(home)
    if uri.startswith("http"):
        return Service("MLflow", redacted(uri), None, f"{uri.rstrip('/')}/health")
    port = free_port(int(os.environ.get("MLFLOW_PORT", "5000")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1", "--artifacts-destination", str(home / "mlartifacts")]  # fmt: skip
    pages = f"{address}/#/experiments?workflowType=machine_learning (MLFLOW_TRACKING_URI={address})"
    return Service("MLflow", pages, command, f"{address}/health", {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def _prefect() -> Service:
    api = os.environ.get("PREFECT_API_URL")
    if api:
        return Service("Prefect", redacted(api.removesuffix("/api")), None, f"{api.rstrip('/')}/health")
    port = free_port(int(os.environ.get("PREFECT_SERVER_API_PORT", "4200")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # Its page asks port 4200 wherever it is served from, unless it is told.
    environment = {"PREFECT_SERVER_UI_API_URL": f"{address}/api", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    return Service(
        "Prefect", f"{address} (PREFECT_API_URL={address}/api)", command, f"{address}/api/health", environment
    )


def _serve(services: list[Service], home: Path, say: Say, watch: Callable[[], None] = lambda: None) -> None:
    home.mkdir(parents=True, exist_ok=True)
    # SIGTERM raises a KeyboardInterrupt too (`graceful`); here neither is a mistake.
    with graceful(), suppress(KeyboardInterrupt), _running(services, home) as parts:
        for service in services:
            if service.health is not None and service.name in parts:
                _wait_for(service.name, service.health, parts[service.name].process, home)
            say(f"{service.name}: {service.address}")
        say("Ctrl-C ends them." if parts else "They are servers of yours; nothing was started.")
        watched = time.monotonic()
        while parts:
            for part in parts.values():
                part.look(say)
            if time.monotonic() > watched + WATCH_SECONDS:
                watch()
                watched = time.monotonic()
            time.sleep(LOOK_SECONDS)


def _log(service: str, home: Path) -> Path:
    return home / f"{service.lower()}.log"


class _Part:
    """A service that this process runs, and starts again by itself where it ends."""

    def __init__(self, service: Service, home: Path) -> None:
        self._service, self._log = service, _log(service.name, home)
        self._log.unlink(missing_ok=True)
        self._wait = AGAIN_SECONDS[0]
        self._due: float | None = None
        """When it is to be started again; None while it runs."""
        self._start()

    def _start(self) -> None:
        assert self._service.command is not None
        with self._log.open("ab") as log:
            # A session of its own: it has children, and Ctrl-C is ours to pass on.
            self.process = subprocess.Popen(
                self._service.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **self._service.environment},
            )  # fmt: skip
        self._started, self._due = time.monotonic(), None

    def look(self, say: Say) -> None:
        """Start it again, after a while, where it has ended."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self._start()
            return
        if self.process.poll() is None:
            return
        _end([self.process])  # children that outlived it may hold its port
        if now - self._started > STEADY_SECONDS:
            self._wait = AGAIN_SECONDS[0]
        self._due = now + self._wait
        say(
            f"{self._service.name} ended with code {self.process.returncode} and is started again in "
            f"{self._wait:.0f} s; see {self._log}"
        )
        self._wait = min(2 * self._wait, AGAIN_SECONDS[1])


@contextmanager
def _running(services: list[Service], home: Path) -> Iterator[dict[str, _Part]]:
    """Start the services that have a command; gives them by name."""
    parts: dict[str, _Part] = {}
    try:
        for service in services:
            if service.command is not None:
                parts[service.name] = _Part(service, home)
        yield parts
    finally:
        _end([part.process for part in parts.values()])


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """End processes, all at once, and their children, which are in process groups of ours."""
    for sign, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0)):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + patience
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.wait()


def _wait_for(service: str, health: str, process: subprocess.Popen[bytes], home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while no_answer(health, timeout=2) is not None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise TetherError(f"{service} did not come up; see {_log(service, home)}")
        time.sleep(0.3)
