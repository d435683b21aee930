"""Prefect and MLflow servers of a test, which can be stopped and started again, and a proxy that can be away."""

import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal

from flows.deployment.local_servers import free_port
from tasks.prefect_flow.server import no_answer
from tests.waiting import PATIENCE, until


def clean_environment() -> dict[str, str]:
    """The environment without what a person has set for servers."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "TETHER_"))}
    return {**kept, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


class LocalServer:
    """A server on loopback with its files in `folder`; it keeps its port over a restart."""

    name: str

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port(0)
        self._environment = clean_environment()
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, *command: str, health: str) -> None:
        """Start it by a command, and return once it answers at `health`."""
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            until(f"{self.name} answers", lambda: no_answer(health) is None, failed=self._process.poll)
        except AssertionError as error:
            self.kill()
            raise AssertionError(self.log()) from error

    def log(self) -> str:
        """What it has said."""
        return (self.folder / "server.log").read_text(errors="replace")

    def pids(self) -> list[int]:
        """The processes of the server and its workers."""
        assert self._process is not None
        group = ["ps", "-o", "pid=", "-g", str(self._process.pid)]
        return [int(pid) for pid in subprocess.run(group, capture_output=True, text=True, check=True).stdout.split()]

    def signal(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        """End it, as an operator does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(PATIENCE * 60)
            self._process = None

    def kill(self) -> None:
        """End it by SIGKILL; nothing where it does not run."""
        if self._process is not None and self._process.poll() is None:
            self.signal(signal.SIGKILL)
            self._process.wait(PATIENCE * 30)


class PrefectServer(LocalServer):
    """`prefect server start` with its database in `folder`."""

    name = "Prefect"

    def __init__(self, folder: Path, **environment: str) -> None:
        super().__init__(folder)
        self.api = f"http://127.0.0.1:{self.port}/api"
        # Without its own address its pages ask port 4200.
        self._environment |= {"PREFECT_HOME": str(folder), "PREFECT_SERVER_UI_API_URL": self.api, **environment}

    def start(self) -> "PrefectServer":
        """Start it, and return once it answers."""
        command = (str(Path(sys.executable).parent / "prefect"), "server", "start", "--host", "127.0.0.1")
        self._start(*command, "--port", str(self.port), health=f"{self.api}/health")
        return self


class MlflowServer(LocalServer):
    """`mlflow server` that stores the artifacts for its clients: runs and models in SQLite, files in `artifacts`."""

    name = "MLflow"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.artifacts, self.uri = folder / "artifacts", f"http://127.0.0.1:{self.port}"
        self._environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] = "false"

    def start(self) -> "MlflowServer":
        """Start it, and return once it answers."""
        self._start(
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{self.folder / 'server.db'}", "--serve-artifacts",
            "--artifacts-destination", str(self.artifacts), health=f"{self.uri}/health",
        )  # fmt: skip
        return self


ANSWER = b"HTTP/1.1 %s\r\nContent-Length: 2\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n{}"


class Proxy(socketserver.ThreadingTCPServer):
    """Passes connections on to a server on loopback, and stands for its absence.

    `away` is None, or how it is away: `gone` (nothing answers), or `database`: its health is fine and all else is a
    500, as Prefect says while PostgreSQL is away.
    """

    allow_reuse_address = daemon_threads = True
    block_on_close = False

    def __init__(self, port: int) -> None:
        self.behind = port
        self.away: Literal["gone", "database"] | None = None
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", 0), _Passing)
        self.port = int(self.server_address[1])
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are what it is for."""

    def fall(self, how: Literal["gone", "database"]) -> None:
        """Be away from now on, for open connections too."""
        self.away = how
        for each in list(self._open):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def rise(self) -> None:
        """Be there again."""
        self.away = None


class _Passing(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        """Pass bytes both ways, or answer for the server."""
        if self.server.away == "gone":
            return
        if self.server.away == "database":
            asked = self.request.recv(65536)
            fine = asked.startswith((b"GET /health", b"GET /api/health"))
            self.request.sendall(ANSWER % (b"200 OK" if fine else b"500 Internal Server Error"))
            return
        with socket.create_connection(("127.0.0.1", self.server.behind)) as behind:
            ends = {self.request, behind}
            self.server._open |= ends
            back = threading.Thread(target=self._pass, args=(behind, self.request), daemon=True)
            back.start()
            self._pass(self.request, behind)
            back.join()
            self.server._open -= ends

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(65536):
                target.sendall(chunk)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)
