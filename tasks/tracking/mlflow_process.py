"""A process that sends a run's folder to MLflow, seen from the run, which then need not import MLflow (2 to 5 s).

The run writes lines to its standard input: first whose folder to send, then `more` or `end`. It answers with lines of
JSON on a pipe of their own: its log records, when MLflow is imported, and whether MLflow accepts data. Its standard
output is not read, because anything can print there. It ends when its input ends, and so does not outlive the run.
"""

import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

from tasks.tracking.mlflow_client import VARIABLE

ROOT = Path(__file__).resolve().parents[2]
"""The folder with Tether's packages, which need not be installed."""
CODE = "import sys; sys.path[:] = {path!r}; from tasks.tracking.mlflow_sync import serve; serve()"

logger = logging.getLogger(__name__)

_waiting: "MlflowProcess | None" = None
"""One that was started before its run was known."""


class MlflowProcess:
    """A process with MLflow, which sends the folder of one run."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.answers = True
        """Whether MLflow accepted the last data sent."""
        self.imported = threading.Event()
        """Set once MLflow is imported, or the process has ended."""
        # The run's own path, because a script can have added folders; "" would be the folder of the user.
        path = [folder for folder in sys.path if folder and isinstance(folder, str)]
        code = CODE.format(path=[*path, str(ROOT)])
        reading, writing = os.pipe()
        self._answers = os.fdopen(reading, "rb")
        try:
            self._process = subprocess.Popen(
                # -P: the user's folder can have a package `tasks` too.
                [sys.executable, "-P", "-c", code, str(home.absolute()), str(writing)], pass_fds=[writing],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C goes to the run only
            )  # fmt: skip
        except OSError:
            self._answers.close()
            raise
        finally:
            os.close(writing)
        self._reader = threading.Thread(target=self._read, name="tracking", daemon=True)
        self._ending = False

    def begin(self, run: str) -> None:
        """Send the folder of `run`, from now on."""
        level = logging.getLogger("tasks.tracking").getEffectiveLevel()
        self._tell(json.dumps({"run": run, "level": level}))
        try:
            self._reader.start()
        except RuntimeError:  # the system starts no further thread
            self._process.kill()
            self._process.wait()
            self._close()
            raise

    def more(self) -> None:
        """Say that the folder has something new."""
        self._tell("more")

    def end(self) -> None:
        """Say that the run has ended: the process sends the folder once more, and ends."""
        self._ending = True
        self._tell("end")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def kill(self) -> None:
        """End the process now, if it still runs. What it said before is printed."""
        self._ending = True
        self._process.kill()
        self._reader.join()
        self._close()

    def _close(self) -> None:
        self._answers.close()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()

    def _tell(self, text: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, which `_read` reports
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()

    def _read(self) -> None:
        for line in self._answers:
            if not line.endswith(b"\n"):
                break  # it was killed while it wrote
            message = json.loads(line)
            if "imported" in message:
                self.imported.set()
            elif "answers" in message:
                self.answers = message["answers"]
            else:
                source = logging.getLogger(message["name"])
                if source.isEnabledFor(message["levelno"]):
                    source.handle(logging.makeLogRecord(message))
        self.imported.set()
        code = self._process.wait()
        if not self._ending:
            logger.warning(
                "the process that sends this run to MLflow ended (exit code %d). The next run or `tether sync` sends "
                "the rest.", code,
            )  # fmt: skip


def begin_early(home: Path) -> None:
    """Start a process that imports MLflow, and opens its database if there is one, while a run is being prepared.

    Not if this process has imported MLflow or is about to, because it checks its access to a server.
    """
    global _waiting
    if _waiting is None and "mlflow" not in sys.modules and not os.environ.get(VARIABLE, "").startswith("http"):
        with suppress(OSError):  # the run tries again
            _waiting = MlflowProcess(home)


def take(home: Path) -> MlflowProcess | None:
    """Return the process that `begin_early` started for `home`; None if there is none."""
    global _waiting
    process, _waiting = _waiting, None
    return process if process is not None and process.home == home and process.is_alive() else None
