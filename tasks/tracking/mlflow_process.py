"""A thread that has a run's folder sent to MLflow, usually by a process, as importing MLflow takes 2 to 5 s.

This module imports little, so that the process can start while a command still imports what it needs.
"""

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tasks.tracking.mlflow_client import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
"""The folder with Tether's packages, which need not be installed."""
CODE = "import sys; sys.path[:] = {path!r}; from tasks.tracking.mlflow_sync import serve; serve()"

logger = logging.getLogger(__name__)

_early: "MlflowThread | None" = None
"""One that was started before its run was known."""


class MlflowThread(threading.Thread):
    """Sends a run's folder (`mlflow_sync.send`): in this process if MLflow is imported here, otherwise in another one.

    That process does not get the run's Ctrl-C, and what it logs is logged here.
    """

    def __init__(self, home: Path, send: Callable[[Path, int], None] | None = None) -> None:
        """`send` is called in this process if MLflow is imported here."""
        super().__init__(name="tracking", daemon=True)
        self.home, self._here = home, send if "mlflow" in sys.modules else None
        self._reading, self._writing = os.pipe()
        self.start()

    def tell(self, text: str) -> None:
        """Write a line to it: first the run's id, then anything whenever the folder has something new."""
        with suppress(BrokenPipeError):  # it has ended, which was logged
            os.write(self._writing, f"{text}\n".encode())

    def end(self) -> None:
        """Say that the run has ended: the folder is sent once more, and the thread ends."""
        os.close(self._writing)

    def run(self) -> None:
        if self._here is not None:
            self._here(self.home, self._reading)
            return
        # The run's own path, because a script can have added folders; "" would be the folder of the user, who can have
        # a package `tasks` too, as would be without -P.
        code = CODE.format(path=[*filter(None, sys.path), str(ROOT)])
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code, str(self.home.absolute())],
                stdin=self._reading, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace",
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            self._warn(str(error))
            return
        finally:
            os.close(self._reading)
        with process:
            for line in process.stderr or ():
                logger.warning("%s", line.rstrip())
        if process.returncode:
            self._warn(f"exit code {process.returncode}")

    def _warn(self, why: str) -> None:
        rest = "The next run or `tether sync` sends the rest."
        logger.warning("the process that sends this run to MLflow ended (%s). %s", why, rest)


def begin_early(home: Path) -> None:
    """Start a thread whose process imports MLflow, and opens its database if there is one, while a run is prepared.

    Not if this process has imported MLflow or is about to, because it checks its access to a server.
    """
    global _early
    if _early is None and "mlflow" not in sys.modules and not os.environ.get(VARIABLE, "").startswith("http"):
        _early = MlflowThread(home)


def thread_of(home: Path, send: Callable[[Path, int], None]) -> MlflowThread:
    """Return the thread that `begin_early` started for `home`, or a new one."""
    global _early
    early, _early = _early, None
    return early if early is not None and early.home == home else MlflowThread(home, send)
