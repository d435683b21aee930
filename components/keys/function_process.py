"""A user's Python function in a separate process with a time limit."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.keys import function_worker


class FunctionProcess:
    """The process, which stays until `close`. A mistake of the function is a UserError that starts with `where`."""

    def __init__(
        self, where: str, root: Path, module: str, name: str, timeout: float,
        *, installed: bool = False, option: str = "timeout",
    ) -> None:  # fmt: skip
        """Start the process, which imports the module from `root`, or if `installed` from the environment.

        Args:
            timeout: limit in seconds of each call; that of the first includes the import.
            option: the name of the option that holds `timeout`, for messages.
        """
        self.where, self._timeout, self._option = where, timeout, option
        worker = str(Path(function_worker.__file__).resolve())
        self.process = subprocess.Popen(
            [sys.executable, worker, str(root), module, name, str(os.getpid()), *(["installed"] if installed else [])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C goes to the caller only; the process ends with it
        )  # fmt: skip

    def call(self, what: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the worker's answer to a request; an empty one only imports the function.

        Args:
            what: what the function does, for the message when it takes too long.

        Raises:
            UserError: the function cannot be imported, takes longer than the time limit, or ends the process.
        """
        assert self.process.stdin is not None and self.process.stdout is not None
        deadline = time.monotonic() + self._timeout
        timer = threading.Timer(self._timeout, self._kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(request, default=dict).encode() + b"\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            timer.cancel()
        if time.monotonic() >= deadline:
            self.close()
            raise self.error(
                f"{what} takes longer than its time limit of {self._timeout:g} s. Make it faster, or raise "
                f"{self._option}."
            )
        if not line.endswith(b"\n"):
            status = self.process.wait()
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            raise self.error(f"its process ended ({how}). Look at what it printed above, and correct the function.")
        answer = json.loads(line)
        if "unusable" in answer:
            raise self.error(answer["unusable"])
        return answer

    def close(self) -> None:
        """End the process and those that it has started."""
        self._kill()
        self.process.communicate()

    def error(self, text: str) -> UserError:
        """Return an error about the function."""
        return UserError(f"{self.where}: {text}")

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
