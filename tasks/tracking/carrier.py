"""MLflow is brought to what runs' folders hold, again and again. Nothing waits for it: a run writes to its own folder.

What MLflow can't take stays on disk; the next run's thread, or `tether sync`, carries what earlier runs left first.
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
"""How long `tether sync` waits before it asks again: at first, doubled each time, and at most."""
SETTLE_SECONDS = 5.0
"""How long a page that links to MLflow waits for the runs there."""
CLOSE_SECONDS = 20.0
"""How long a run that is done waits for what is still on its way, where MLflow answers; else it waits for nothing."""


class Tracker:
    """The thread that sends one run's folder to MLflow. Only `close` waits for MLflow, and only briefly."""

    def __init__(self, home: Path, run: str) -> None:
        self._home = home
        self._folder = home / "runs" / run
        self._closing = threading.Event()
        self._more = threading.Event()
        self._answers = True
        """Whether MLflow took what it was last sent."""
        self._thread = threading.Thread(target=self._carry, name="tracking", daemon=True)

    def open(self, project: str) -> None:
        """Start to record a run that begins or resumes in the experiment `project`."""
        if not (self._folder / "mlflow.json").is_file():
            Sent(project=project, code=code_tags(code_version())).save(self._folder)
        with suppress(ImportError):  # the thread says so
            # Not in the thread: two threads that import libraries which need each other can trip over them.
            load_mlflow()
        self._thread.start()

    def nudge(self) -> None:
        """Tell the thread that the folder has something new."""
        self._more.set()

    def close(self) -> bool:
        """End the recording. Returns whether MLflow has all of the run by now."""
        self._closing.set()
        self._more.set()
        self._thread.join(CLOSE_SECONDS)
        return not is_left(self._folder)

    def settle(self, stages: Collection[str]) -> None:
        """Wait until `stages` have their pages in MLflow, a few seconds at most and only while it answers."""
        self._more.set()
        deadline = time.monotonic() + SETTLE_SECONDS
        while has_pages(self._home) and self._answers and self._thread.is_alive() and time.monotonic() < deadline:
            if set(stages) <= Sent.load(self._folder).stages.keys():
                return
            time.sleep(0.05)

    def _carry(self) -> None:
        """The thread: as long as the run, and once more at its end."""
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
                except Exception as error:  # whatever MLflow raises: all of it is on disk, and this is said
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
        What MLflow has against this run (it was deleted there, say), or a damaged file of its folder: no reason to hold
        back others.

    Raises:
        Exception: MLflow doesn't answer.
    """
    with held(folder, wait=False) as mine:
        if not mine:
            return None
        try:
            recorder.bring(folder, over=True)
        except Exception as error:
            recorder.check()
            if isinstance(error, UserError):  # MLflow has nothing to do with it
                logger.warning("run %s is not sent to MLflow: %s", folder.name, error)
            else:
                logger.warning("MLflow does not take what is left of run %s: %s", folder.name, in_short(error))
            return error
        logger.info("what run %s had left is in MLflow now", folder.name)
        return None


def left_behind(home: Path) -> list[Path]:
    """Folders of the runs that have ended, or died, of which MLflow lacks a part; the oldest first."""
    found, damaged = load_readable(home)
    for run in damaged:
        logger.warning("run %s is not sent to MLflow: its run.json is damaged", run)
    return [folder for folder in (home / "runs" / each.run for each in reversed(found)) if is_left(folder)]


def is_left(folder: Path) -> bool:
    """Return whether a run has ended or died, and MLflow lacks a part of it."""
    if not (folder / "mlflow.json").is_file():
        return False
    run = read_file(folder)
    return (run.finished is not None or run.died) and Sent.load(folder).whole != run.updated


def sync(
    home: Path, patience: float = 0.0, say: Callable[[str], object] = logger.info
) -> Iterator[tuple[str, Exception | None]]:
    """Send what is left behind, the oldest run first. Yields each run, with the error where MLflow refuses it.

    What another process is carrying just now is left to it.

    Args:
        home: the `TETHER_HOME`.
        patience: for how many seconds an MLflow that takes nothing on is asked again.
        say: tells a person that it is.

    Raises:
        Exception: MLflow doesn't answer.
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
                continue  # it took something on: a slow server, which answers again
            except UserError:
                raise
            except Exception as error:  # whatever MLflow and its transports raise
                if Sent.load(folder) != before:
                    until, wait = time.monotonic() + patience, AGAIN_SECONDS[0]
                if time.monotonic() + wait > until:
                    raise
                say(f"{folder.name}: MLflow does not answer ({in_short(error)}); asking again in {wait:.0f} s")
            time.sleep(wait)
            wait = min(2 * wait, AGAIN_SECONDS[1])
        yield folder.name, refused
