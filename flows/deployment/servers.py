"""Servers and workers on this machine, as long as the command runs: the pages of MLflow and Prefect, and both pools."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from components.base.errors import TetherError
from components.training.stopping import graceful
from tasks.prefect_flow.server import no_answer
from tasks.tracking.client import tracking_uri

START_SECONDS = 120.0
STOP_SECONDS = 30.0

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
        TetherError: one does not come up, or ends.
    """
    _serve([_mlflow(home), _prefect()], home, say)


def serve_pools(home: Path, pools: Iterable[str], say: Say) -> None:
    """Start a worker for each pool, and end them with this process. Runs at work are told to stop, and can resume.

    Raises:
        TetherError: one ends by itself.
    """
    workers = [
        Service(
            f"worker-{pool}",
            f"takes runs of pool {pool}",
            [sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process"],
            environment={"PREFECT_LOGGING_LEVEL": "INFO", "PREFECT_WORKER_QUERY_SECONDS": "3"},
        )
        for pool in pools
    ]
    _serve(workers, home, say)


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
        return Service("MLflow", uri, None, f"{uri.rstrip('/')}/health")
    port = free_port(int(os.environ.get("MLFLOW_PORT", "5000")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1", "--artifacts-destination", str(home / "mlartifacts")]  # fmt: skip
    pages = f"{address}/#/experiments?workflowType=machine_learning (MLFLOW_TRACKING_URI={address})"
    return Service("MLflow", pages, command, f"{address}/health", {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def _prefect() -> Service:
    api = os.environ.get("PREFECT_API_URL")
    if api:
        return Service("Prefect", api.removesuffix("/api"), None, f"{api.rstrip('/')}/health")
    port = free_port(int(os.environ.get("PREFECT_SERVER_API_PORT", "4200")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # Its page asks port 4200 wherever it is served from, unless it is told.
    environment = {"PREFECT_SERVER_UI_API_URL": f"{address}/api", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    return Service(
        "Prefect", f"{address} (PREFECT_API_URL={address}/api)", command, f"{address}/api/health", environment
    )


def _serve(services: list[Service], home: Path, say: Say) -> None:
    home.mkdir(parents=True, exist_ok=True)
    # SIGTERM raises a KeyboardInterrupt too (`graceful`); here neither is a mistake.
    with graceful(), suppress(KeyboardInterrupt), _running(services, home) as processes:
        for service in services:
            if service.health is not None and service.name in processes:
                _wait_for(service.name, service.health, processes[service.name], home)
            say(f"{service.name}: {service.address}")
        say("Ctrl-C ends them." if processes else "They are servers of yours; nothing was started.")
        while processes:
            for name, process in processes.items():
                if process.poll() is not None:
                    raise TetherError(f"{name} ended with code {process.returncode}; see {_log(name, home)}")
            time.sleep(0.5)


def _log(service: str, home: Path) -> Path:
    return home / f"{service.lower()}.log"


@contextmanager
def _running(services: list[Service], home: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start the services that have a command; gives the processes by the services' names."""
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for service in services:
            if service.command is not None:
                with _log(service.name, home).open("wb") as log:
                    # A session of its own: they have children, and Ctrl-C is ours to pass on.
                    processes[service.name] = subprocess.Popen(
                        service.command,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, **service.environment},
                        start_new_session=True,
                    )
        yield processes
    finally:
        _end(processes.values())


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
