"""A Prefect server of a test, which can be stopped and started again."""

import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from flows.deployment.servers import free_port


def clean_environment() -> dict[str, str]:
    """The environment without what a person has set for servers."""
    kept = {name: text for name, text in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_", "TETHER_"))}
    return {**kept, "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "DO_NOT_TRACK": "1"}


class PrefectServer:
    """`prefect server start` on loopback with its database in `folder`; it keeps its port over a restart."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.port = free_port(0)
        self.api = f"http://127.0.0.1:{self.port}/api"
        self._environment = {**clean_environment(), "PREFECT_HOME": str(folder), **environment}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> "PrefectServer":
        """Start it, and return once it answers."""
        command = [Path(sys.executable).parent / "prefect", "server", "start", "--host", "127.0.0.1"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, "--port", str(self.port)], env=self._environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + 120
        while not self.is_up():
            assert self._process.poll() is None and time.monotonic() < deadline, self.log()
            time.sleep(0.2)
        return self

    def stop(self) -> None:
        """End it, as an operator does."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            urllib.request.urlopen(f"{self.api}/health", timeout=2).close()
        except OSError:
            return False
        return True

    def log(self) -> str:
        """What it has said."""
        return (self.folder / "server.log").read_text(errors="replace")
