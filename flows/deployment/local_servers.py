"""Run servers and workers on this machine while the command runs: MLflow's and Prefect's pages, and the pools' workers.

A part that ends, ends the command: systemd, compose and Kubernetes start it again where that is wanted.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import anyio
import psutil

from components.base.errors import TetherError
from components.base.redaction import redacted
from components.training.stopping import SIGNALS, graceful
from tasks.prefect_flow.server import PATIENCE, no_answer
from tasks.tracking.mlflow_client import tracking_uri

if TYPE_CHECKING:
    from prefect.workers.process import ProcessWorker

Say = Callable[..., None]

START_SECONDS = 600.0
STOP_SECONDS = 30.0
LOOK_SECONDS = 0.5
CPU_RUNS = 2
"""Pipelines that a worker of the pool cpu runs at once. One that computes takes 1 GB and all cores."""


class PageServer(NamedTuple):
    """A server of pages, and how to describe it to a person."""

    name: str
    address: str
    health: str
    """A URL that answers once the server is up."""
    command: list[str] | None = None
    """None if the user's own server is used."""
    environment: Mapping[str, str] = MappingProxyType({})


def serve_pages(home: Path, say: Say) -> None:
    """Run MLflow's and Prefect's servers and print their addresses, until this process is told to stop.

    Raises:
        TetherError: a server does not start, or ends.
    """
    home.mkdir(parents=True, exist_ok=True)
    servers = [_mlflow(home), _prefect()]
    # SIGTERM raises KeyboardInterrupt too (`graceful`); here neither is an error.
    with graceful(), suppress(KeyboardInterrupt), ExitStack() as stack:
        processes = [(server, stack.enter_context(_started(server, home))) for server in servers if server.command]

        def check() -> None:
            for server, process in processes:
                if (code := process.poll()) is not None:
                    raise TetherError(f"{server.name} ended with code {code}; see {_log(server, home)}")
            time.sleep(LOOK_SECONDS)

        for server in servers:
            deadline = time.monotonic() + START_SECONDS
            while server.command and no_answer(server.health, timeout=2) is not None:
                check()
                if time.monotonic() > deadline:
                    raise TetherError(f"{server.name} did not start; see {_log(server, home)}")
            say(f"{server.name}: {server.address}")
        say("Ctrl-C stops them." if processes else "Both servers are your own; nothing was started.")
        while processes:
            check()


def worker_environment() -> None:
    """Set the variables that Prefect reads at import as a worker needs them."""
    os.environ["PREFECT_LOGGING_LEVEL"] = "INFO"
    os.environ.setdefault("PREFECT_WORKER_QUERY_SECONDS", "3")
    # A server whose database is away answers 500. Without this, a worker gives up after two minutes.
    os.environ["PREFECT_CLIENT_RETRY_EXTRA_CODES"] = PATIENCE["PREFECT_CLIENT_RETRY_EXTRA_CODES"]


def serve_pools(home: Path, pools: Mapping[str, int], say: Say) -> None:
    """Run Prefect's process worker for each pool, continue crashed runs and report a full disk, until this process is
    told to stop. Runs in progress are stopped and can continue later.

    Args:
        home: the folder whose disk is watched.
        pools: maps a pool to how many of its runs are computed here at once.
        say: gets lines for a person.

    Raises:
        TetherError: a worker ended.
    """
    from prefect.workers.process import ProcessWorker

    from flows.deployment.recovery import resume_while_served

    async def work() -> None:
        stop = asyncio.Event()
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals stay ignored, as under nohup
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
        workers = [ProcessWorker(work_pool_name=pool, limit=limit) for pool, limit in pools.items()]
        for pool, limit in pools.items():
            say(f"worker of pool {pool}: {limit} at a time")
        say("Ctrl-C stops them.")

        def busy_runs() -> set[object]:
            """Return the runs that take a place. A worker ends if it is given one of them again."""
            return {run for worker in workers if worker.is_setup for run in worker.limiter.statistics().borrowers}

        starts = [worker.start(printer=say) for worker in workers]
        parts = [stop.wait(), resume_while_served(home, pools, say, busy_runs), *starts]
        tasks = [asyncio.ensure_future(part) for part in parts]
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[1].cancel()
        await _stop_runs(workers)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for error in filter(None, (task.exception() for task in ended)):
            while isinstance(error, BaseExceptionGroup):  # of the worker's task group
                error = error.exceptions[0]
            raise TetherError(f"a worker ended: {error} Start `tether serve` again.") from error

    with graceful():
        asyncio.run(work())


async def _stop_runs(workers: Iterable["ProcessWorker"]) -> None:
    """Stop the runs in progress by SIGTERM and wait until they have written their checkpoints, up to `STOP_SECONDS`.

    Prefect's worker kills them when it is cancelled.
    """
    for run in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            run.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    while psutil.Process().children() and time.monotonic() < deadline:
        for worker in workers:
            with suppress(anyio.WouldBlock, RuntimeError):  # no place is left for another run, or it has not begun
                while True:
                    worker.limiter.acquire_on_behalf_of_nowait(object())
        await asyncio.sleep(0.1)


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


def _mlflow(home: Path) -> PageServer:
    uri = tracking_uri(home)
    if uri.startswith("http"):
        return PageServer("MLflow", redacted(uri), f"{uri.rstrip('/')}/health")
    port = free_port(int(os.environ.get("MLFLOW_PORT", "5000")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1", "--artifacts-destination", str(home / "mlartifacts")]  # fmt: skip
    pages = f"{address}/#/experiments?workflowType=machine_learning (MLFLOW_TRACKING_URI={address})"
    return PageServer("MLflow", pages, f"{address}/health", command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def _prefect() -> PageServer:
    api = os.environ.get("PREFECT_API_URL")
    if api:
        return PageServer("Prefect", redacted(api.removesuffix("/api")), f"{api.rstrip('/')}/health")
    port = free_port(int(os.environ.get("PREFECT_SERVER_API_PORT", "4200")))
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    # Its page asks port 4200 by default, wherever it is served from.
    environment = {"PREFECT_SERVER_UI_API_URL": f"{address}/api", "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false"}
    pages = f"{address} (PREFECT_API_URL={address}/api)"
    return PageServer("Prefect", pages, f"{address}/api/health", command, environment)


def _log(server: PageServer, home: Path) -> Path:
    return home / f"{server.name.lower()}.log"


@contextmanager
def _started(server: PageServer, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server with its log in `home`, and end it and its children after the block."""
    assert server.command is not None
    environment = {**os.environ, **server.environment}
    with _log(server, home).open("wb") as log:
        # In a session of its own, because it has children and this process passes Ctrl-C on.
        process = subprocess.Popen(
            server.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, env=environment
        )
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # children that outlive it may hold its port
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
