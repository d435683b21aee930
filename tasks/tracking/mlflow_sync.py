"""Send the contents of runs' folders to MLflow. Nothing waits for it: a run only writes to its own folder.

A process or thread reads a pipe: first a run's id, then a line whenever the run's folder has something new. When the
pipe ends, the run has ended or died, and the rest is sent. What MLflow can't accept stays on disk, and the next run,
or `tether sync`, first sends what earlier runs left.
"""

import contextlib
import gc
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NoReturn

from components.base.errors import UserError
from components.keys.code_version import code_version
from components.store.leases import if_free, leased
from tasks.runs.journal import SENDING_LOCK, SENT, Sent, code_tags
from tasks.runs.status import RUN_FILE, read_file
from tasks.tracking.address import has_pages
from tasks.tracking.mlflow_client import database_file, in_short, load_mlflow
from tasks.tracking.mlflow_process import thread_of
from tasks.tracking.recorder import Recorder

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
RETRY_SECONDS = 10.0
SETTLE_SECONDS = 5.0
"""How long a page that links to MLflow waits for the runs there."""
CLOSE_SECONDS = 20.0
"""How long a finished run waits for MLflow to accept more of its data: while MLflow accepts some, the run waits on. If
MLflow does not answer, the run does not wait."""


class Tracker:
    """Has one run's folder sent to MLflow. Only `close` waits for MLflow, and only briefly."""

    def __init__(self, home: Path, run: str, project: str) -> None:
        """Start recording a run that begins or resumes, in the experiment `project`."""
        self._folder = home / "runs" / run
        if not (self._folder / SENT).is_file():
            Sent(project=project, code=code_tags(code_version())).save(self._folder)
        self._thread = thread_of(home, send)
        self._thread.tell(run)
        self._patient = has_pages(home)

    def notify(self) -> None:
        """Say that the folder has something new."""
        self._thread.tell("")

    def close(self) -> bool:
        """Stop recording, and return whether MLflow has all of the run."""
        self._thread.end()
        before: Sent | None = None
        while self._thread.is_alive() and (now := Sent.load(self._folder)) != before:
            before = now
            self._thread.join(CLOSE_SECONDS)
        return not is_left(self._folder)

    def settle(self, stages: Collection[str]) -> None:
        """Wait a few seconds until `stages` have their pages in MLflow, unless MLflow had no answer before."""
        self.notify()
        deadline = time.monotonic() + SETTLE_SECONDS
        while self._patient and not set(stages) <= Sent.load(self._folder).stages.keys():
            self._patient = self._thread.is_alive() and time.monotonic() < deadline
            time.sleep(0.05)


def serve() -> NoReturn:
    """Be the process of an `MlflowThread`."""
    gc.disable()  # imports make many objects and no garbage
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run still has to tell MLflow how it ended
        signal.signal(number, signal.SIG_IGN)
    home, recorder = Path(sys.argv[1]), None
    with contextlib.suppress(Exception):  # raised again, and reported, once there is a run
        load_mlflow()
        if (path := database_file(home)) is not None and path.is_file():
            recorder = Recorder(home)
    gc.freeze()
    gc.enable()
    send(home, sys.stdin.fileno(), recorder)
    os._exit(0)


def send(home: Path, messages: int, recorder: Recorder | None = None) -> None:
    """Send the folder of the run that the pipe `messages` names, whenever it has something new, until the pipe ends."""
    left: list[Path] | None = None
    answers, over = True, False
    with os.fdopen(messages, "rb", buffering=0) as pipe:
        if not (run := pipe.readline().decode().strip()):  # it ended before it had begun
            return
        folder = home / "runs" / run
        with contextlib.ExitStack() as lock:
            try:
                lock.enter_context(leased(folder / SENDING_LOCK))
            except (UserError, OSError) as error:
                logger.warning("run %s is not sent to MLflow: %s", run, error)
                return
            while True:
                try:
                    recorder = recorder or Recorder(home)
                    left = left_behind(home) if left is None else left
                    while left:
                        send_rest(recorder, left[0])
                        left.pop(0)
                    recorder.synchronize(folder, over)
                    answers = True
                except Exception as error:  # any MLflow exception: the data stay on disk, and a warning says so
                    logger.debug("MLflow", exc_info=True)
                    if answers:
                        left_in = f"What it does not have yet stays in {folder}."
                        logger.warning("MLflow did not answer (%s). %s", in_short(error), left_in)
                    answers = False
                if over:
                    return
                if select.select([pipe], [], [], EVERY_SECONDS if answers else RETRY_SECONDS)[0]:
                    over = not pipe.read(1 << 12)


def send_rest(recorder: Recorder, folder: Path) -> Exception | None:
    """Send MLflow the rest of a run that has ended, unless another process does.

    Returns:
        MLflow's error for this run (for example, because it was deleted there), or a damaged file in its folder. Such
        an error does not stop the sending of other runs.

    Raises:
        Exception: MLflow does not answer.
    """
    with contextlib.ExitStack() as lock:
        try:
            mine = lock.enter_context(if_free(folder / SENDING_LOCK))
        except (UserError, OSError) as error:
            logger.warning("run %s is not sent to MLflow: %s", folder.name, error)
            return error
        if not mine:
            return UserError("another process is sending it")
        try:
            recorder.synchronize(folder, over=True)
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
    folders = []
    for path in (home / "runs").glob(f"*/{RUN_FILE}"):
        try:
            if is_left(path.parent):
                folders.append(path.parent)
        except FileNotFoundError:  # discarded in the meantime
            continue
        except UserError as error:
            logger.warning("%s It is not sent to MLflow.", error)
    return sorted(folders, key=lambda folder: read_file(folder).started)


def is_left(folder: Path) -> bool:
    """Return whether a run has ended or died and MLflow lacks part of it."""
    if not (folder / SENT).is_file():
        return False
    run = read_file(folder)
    return (run.finished is not None or run.died) and Sent.load(folder).whole != run.updated


def sync(home: Path) -> Iterator[tuple[str, Exception | None]]:
    """Send what earlier runs left, oldest run first. Yields each run, with an error if MLflow refuses it.

    Runs that another process is sending are left to it.

    Raises:
        Exception: MLflow does not answer.
    """
    recorder: Recorder | None = None
    for folder in left_behind(home):
        recorder = recorder or Recorder(home)
        yield folder.name, send_rest(recorder, folder)
