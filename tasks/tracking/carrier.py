"""Send the contents of runs' folders to MLflow. Nothing waits for it: a run only writes to its own folder.

What MLflow can't accept stays on disk. The next run's thread, or `tether sync`, first sends what earlier runs left.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from components.base.errors import UserError
from components.keys.code_version import code_version
from tasks.runs.journal import Sent, code_tags, held
from tasks.runs.status import load_readable, read_file
from tasks.tracking.address import has_pages
from tasks.tracking.client import in_short, load_mlflow
from tasks.tracking.recorder import Recorder

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
RETRY_SECONDS = 10.0
AGAIN_SECONDS = (2.0, 30.0)
"""Seconds until `tether sync` asks again: the first wait, which doubles each time, and the longest."""
SETTLE_SECONDS = 5.0
"""How long a page that links to MLflow waits for the runs there."""
CLOSE_SECONDS = 20.0
"""How long a finished run waits for MLflow to accept more of its data: while MLflow accepts some, the run waits on. If
MLflow does not answer, the run does not wait."""


class Tracker:
    """The thread that sends one run's folder to MLflow. Only `close` waits for MLflow, and only briefly."""

    def __init__(self, home: Path, run: str) -> None:
        self._home = home
        self._folder = home / "runs" / run
        self._closing = threading.Event()
        self._more = threading.Event()
        self._answers = True
        """Whether MLflow accepted the last data sent."""
        self._thread = threading.Thread(target=self._carry, name="tracking", daemon=True)

    def open(self, project: str) -> None:
        """Start recording a run that begins or resumes, in the experiment `project`."""
        if not (self._folder / "mlflow.json").is_file():
            Sent(project=project, code=code_tags(code_version())).save(self._folder)
        with suppress(ImportError):  # the thread reports it
            # Not in the thread, because two threads that import interdependent libraries can deadlock.
            load_mlflow()
        self._thread.start()

    def nudge(self) -> None:
        """Tell the thread that the folder has something new."""
        self._more.set()

    def close(self) -> bool:
        """Stop recording, and return whether MLflow has all of the run."""
        self._closing.set()
        self._more.set()
        before: Sent | None = None
        while self._thread.is_alive() and (now := Sent.load(self._folder)) != before:
            before = now
            self._thread.join(CLOSE_SECONDS)
        return not is_left(self._folder)

    def settle(self, stages: Collection[str]) -> None:
        """Wait until `stages` have their pages in MLflow: a few seconds at most, and only while it answers."""
        self._more.set()
        deadline = time.monotonic() + SETTLE_SECONDS
        while has_pages(self._home) and self._answers and self._thread.is_alive() and time.monotonic() < deadline:
            if set(stages) <= Sent.load(self._folder).stages.keys():
                return
            time.sleep(0.05)

    def _carry(self) -> None:
        """Run the thread: send the folder until the run ends, and once more after that."""
        recorder: Recorder | None = None
        left: list[Path] | None = None
        with held(self._folder, wait=True):
            while True:
                last = self._closing.is_set()
                self._more.clear()
                try:
                    recorder = recorder or Recorder(self._home)
                    left = left_behind(self._home) if left is None else left
                    while left:
                        carry_left(recorder, left[0])
                        left.pop(0)
                    recorder.bring(self._folder, last)
                    self._answers = True
                except Exception as error:  # any MLflow exception: the data stay on disk, and a warning says so
                    logger.debug("MLflow", exc_info=True)
                    if self._answers:
                        left_in = f"What it does not have yet stays in {self._folder}."
                        logger.warning("MLflow did not answer (%s). %s", in_short(error), left_in)
                    self._answers = False
                if last:
                    return
                if self._answers:
                    self._more.wait(EVERY_SECONDS)
                else:
                    self._closing.wait(RETRY_SECONDS)


def carry_left(recorder: Recorder, folder: Path) -> Exception | None:
    """Send MLflow the rest of a run that has ended, unless another process does.

    Returns:
        MLflow's error for this run (for example, because it was deleted there), or a damaged file in its folder. Such
        an error does not stop the sending of other runs.

    Raises:
        Exception: MLflow does not answer.
    """
    with held(folder, wait=False) as mine:
        if not mine:
            return None
        try:
            recorder.bring(folder, over=True)
        except Exception as error:
            recorder.check()
            if isinstance(error, UserError):  # not caused by MLflow
                logger.warning("run %s is not sent to MLflow: %s", folder.name, error)
            else:
                logger.warning("MLflow does not accept the rest of run %s: %s", folder.name, in_short(error))
            return error
        logger.info("the rest of run %s is now in MLflow", folder.name)
        return None


def left_behind(home: Path) -> list[Path]:
    """Return the folders of ended or dead runs that MLflow does not have completely, oldest first."""
    found, damaged = load_readable(home)
    for run in damaged:
        logger.warning("run %s is not sent to MLflow: its run.json is damaged", run)
    return [folder for folder in (home / "runs" / each.run for each in reversed(found)) if is_left(folder)]


def is_left(folder: Path) -> bool:
    """Return whether a run has ended or died and MLflow lacks part of it."""
    if not (folder / "mlflow.json").is_file():
        return False
    run = read_file(folder)
    return (run.finished is not None or run.died) and Sent.load(folder).whole != run.updated


def sync(
    home: Path, patience: float = 0.0, say: Callable[[str], object] = logger.info
) -> Iterator[tuple[str, Exception | None]]:
    """Send what earlier runs left, oldest run first. Yields each run, with an error if MLflow refuses it.

    Runs that another process is sending are left to it.

    Args:
        home: the Tether home.
        patience: for how many seconds to ask again if MLflow accepts nothing.
        say: gets a line before each new attempt.

    Raises:
        Exception: MLflow does not answer.
    """
    recorder: Recorder | None = None
    for folder in left_behind(home):
        until, wait = time.monotonic() + patience, AGAIN_SECONDS[0]
        while True:
            before = Sent.load(folder)
            try:
                recorder = recorder or Recorder(home)
                refused = carry_left(recorder, folder)
                if refused is None or isinstance(refused, UserError) or Sent.load(folder) == before:
                    break
                continue  # it accepted part of the data: a slow server, which answers again
            except UserError:
                raise
            except Exception as error:  # any exception of MLflow and its transports
                if Sent.load(folder) != before:
                    until, wait = time.monotonic() + patience, AGAIN_SECONDS[0]
                if time.monotonic() + wait > until:
                    raise
                say(f"{folder.name}: MLflow does not answer ({in_short(error)}); asking again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, AGAIN_SECONDS[1])
        yield folder.name, refused
