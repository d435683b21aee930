"""Run servers and workers on this machine while the command runs: MLflow's and Prefect's pages, and the pools' workers.

A part that ends is restarted; the other parts, and the runs that they compute, continue.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from components.base.errors import TetherError
from components.base.redaction import redacted
from components.training.stopping import graceful
from flows.deployment.supervision import LOOK_SECONDS, Running, Say, Service, Supervised, end_processes
from tasks.prefect_flow.server import PATIENCE, no_answer
from tasks.tracking.client import tracking_uri

START_SECONDS = 600.0
WATCH_SECONDS = 10.0
CPU_RUNS = 2
"""Pipelines that a worker of the pool cpu runs at once. One that computes takes 1 GB and all cores."""


def serve_pages(home: Path, say: Say) -> None:
    """Run MLflow's and Prefect's servers and print their addresses, until this process is told to stop.

    Raises:
        TetherError: a server does not start.
    """
    _serve([_mlflow(home), _prefect()], home, say)


def serve_pools(home: Path, pools: Mapping[str, int], say: Say, logs: bool = True) -> None:
    """Run a worker for each pool, until this process is told to stop. Runs in progress are stopped and can continue
    later.

    Args:
        home: the folder for their logs.
        pools: maps a pool to how many of its runs are computed here at once.
        say: gets lines for a person.
        logs: whether the workers' output goes into files in the home; otherwise it goes to this process's output.
    """
    from flows.deployment.alerts import DiskWatch
    from flows.deployment.recovery import crash_watch

    disk, resume = DiskWatch(home), crash_watch(pools, say)

    def watch() -> None:
        disk.look()
        resume()

    _serve(worker_services(pools), home, say, watch, logs)


def worker_services(pools: Mapping[str, int]) -> list[Service]:
    """Return a worker for each pool. `pools` maps a pool to how many of its runs are computed here at once."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")  # for several workers of one pool, each with its own GPU
    return [
        Service(
            f"worker-{pool}" + (f"-{devices.replace(',', '-')}" if devices else ""),
            f"takes runs of pool {pool}, {limit} at a time",
            [
                sys.executable, "-m", "prefect", "worker", "start", "--pool", pool, "--type", "process",
                "--limit", str(limit),
            ],
            environment={
                "PREFECT_LOGGING_LEVEL": "INFO",
                "PREFECT_WORKER_QUERY_SECONDS": os.environ.get("PREFECT_WORKER_QUERY_SECONDS", "3"),
                # A server whose database is away answers 500. Without this, a worker gives up after two minutes.
                "PREFECT_CLIENT_RETRY_EXTRA_CODES": PATIENCE["PREFECT_CLIENT_RETRY_EXTRA_CODES"],
            },
        )
        for pool, limit in pools.items()
    ]  # fmt: skip


def free_port(preferred: int) -> int:
    """Return `preferred` if nothing listens on that port on loopback, otherwise a free port."""
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
    # Its page asks port 4200 by default, wherever it is served from.
    environment = {"PREFECT_SERVER_UI_API_URL": f"{address}/api", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    return Service(
        "Prefect", f"{address} (PREFECT_API_URL={address}/api)", command, f"{address}/api/health", environment
    )


def _serve(
    services: list[Service], home: Path, say: Say, watch: Callable[[], None] = lambda: None, logs: bool = True
) -> None:
    home.mkdir(parents=True, exist_ok=True)
    # SIGTERM raises KeyboardInterrupt too (`graceful`); here neither is an error.
    with graceful(), suppress(KeyboardInterrupt), _running(services, home if logs else None) as parts:
        for service in services:
            if service.health is not None and service.name in parts:
                _wait_for(service.name, service.health, parts[service.name].process, home)
            say(f"{service.name}: {service.address}")
        say("Ctrl-C stops them." if parts else "Both servers are your own; nothing was started.")
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


@contextmanager
def _running(services: list[Service], home: Path | None) -> Iterator[dict[str, Supervised]]:
    """Start the services that have a command, and yield them by name. With `home`, their logs are files in it."""
    parts: dict[str, Supervised] = {}
    try:
        for service in services:
            if service.command is not None:
                log = None if home is None else _log(service.name, home)
                if log is not None:
                    log.unlink(missing_ok=True)
                parts[service.name] = Supervised(service, log)
        yield parts
    finally:
        end_processes([part.process for part in parts.values()])


def _wait_for(service: str, health: str, process: Running, home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while no_answer(health, timeout=2) is not None:
        if process.poll() is not None or time.monotonic() > deadline:
            raise TetherError(f"{service} did not start; see {_log(service, home)}")
        time.sleep(0.3)
