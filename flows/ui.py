"""The pages of MLflow and Prefect on loopback, as long as the command runs."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from components.errors import TetherError
from tasks.mlflow_client import tracking_uri

START_SECONDS = 120.0


class Page(NamedTuple):
    """A server to start, and where a person looks at it."""

    name: str
    address: str
    health: str
    command: list[str] | None
    """None where the user's own server is used."""


def serve(home: Path, say: Callable[[str], Any]) -> None:
    """Start both pages, say where they are, and end them with this process.

    Raises:
        TetherError: one does not come up.
    """
    home.mkdir(parents=True, exist_ok=True)
    pages = [_mlflow(home), _prefect()]
    with _until_told_to_stop(), _running(pages, home) as processes:
        for page, process in zip(pages, processes, strict=True):
            if process is not None:
                _wait_for(page, process, home)
            say(f"{page.name}: {page.address}")
        say("Ctrl-C ends both." if any(processes) else "Both are servers of yours; nothing was started.")
        while any(processes):
            for page, process in zip(pages, processes, strict=True):
                if process is not None and process.poll() is not None:
                    raise TetherError(f"{page.name} ended with code {process.returncode}; see {_log(page, home)}")
            time.sleep(0.5)


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


def _mlflow(home: Path) -> Page:
    uri = tracking_uri(home)
    if uri.startswith("http"):
        return Page("MLflow", uri, f"{uri.rstrip('/')}/health", None)
    port = free_port(5000)
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, "--host", "127.0.0.1",
               "--port", str(port), "--workers", "1", "--artifacts-destination", str(home / "mlartifacts")]  # fmt: skip
    return Page("MLflow", f"{address}/#/experiments?workflowType=machine_learning", f"{address}/health", command)


def _prefect() -> Page:
    api = os.environ.get("PREFECT_API_URL")
    if api:
        return Page("Prefect", api.removesuffix("/api"), f"{api.rstrip('/')}/health", None)
    port = free_port(4200)
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    return Page("Prefect", f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port}/api/health", command)


def _log(page: Page, home: Path) -> Path:
    return home / f"{page.name.lower()}-server.log"


@contextmanager
def _running(pages: list[Page], home: Path) -> Iterator[list[subprocess.Popen[bytes] | None]]:
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "PREFECT_UI_SHOW_PROMOTIONAL_CONTENT": "0",
    }
    processes: list[subprocess.Popen[bytes] | None] = []
    try:
        for page in pages:
            if page.command is None:
                processes.append(None)
                continue
            with _log(page, home).open("wb") as log:
                # A session of its own: both servers have children, and Ctrl-C is ours to pass on.
                processes.append(
                    subprocess.Popen(
                        page.command,
                        stdout=log,
                        stderr=log,
                        stdin=subprocess.DEVNULL,
                        env=environment,
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            if process is not None:
                _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and its children, which are in a process group of ours."""
    for sign, patience in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _wait_for(page: Page, process: subprocess.Popen[bytes], home: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(page.health, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise TetherError(f"{page.name} did not come up; see {_log(page, home)}")


@contextmanager
def _until_told_to_stop() -> Iterator[None]:
    """SIGTERM ends the pages as Ctrl-C does; here neither is a mistake."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        with suppress(KeyboardInterrupt):
            yield
    finally:
        signal.signal(signal.SIGTERM, before)
