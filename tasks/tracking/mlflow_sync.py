"""Send the contents of runs' folders to MLflow. Nothing waits for it: a run only writes to its own folder.

What MLflow can't accept stays on disk. The next run, or `tether sync`, first sends what earlier runs left.
"""

import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from components.base.errors import UserError
from components.keys.code_version import code_version
from tasks.runs.journal import SENT, Sent, code_tags, held
from tasks.runs.status import RUN_FILE, read_file
from tasks.tracking.address import has_pages
from tasks.tracking.mlflow_client import database_file, in_short, load_mlflow
from tasks.tracking.mlflow_process import MlflowProcess, take
from tasks.tracking.recorder import Recorder

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
RETRY_SECONDS = 10.0
SETTLE_SECONDS = 5.0
"""How long a page that links to MLflow waits for the runs there."""
CLOSE_SECONDS = 20.0
"""How long a finished run waits for MLflow to accept more of its data, once MLflow is imported: while MLflow accepts
some, the run waits on. If MLflow does not answer, the run does not wait."""


class Tracker:
    """Sends one run's folder to MLflow: by a process of its own, or by a thread where MLflow is imported already.

    Only `close` waits for MLflow, and only briefly.
    """

    def __init__(self, home: Path, run: str, project: str) -> None:
        """Start recording a run that begins or resumes, in the experiment `project`."""
        self._home, self._folder = home, home / "runs" / run
        if not (self._folder / SENT).is_file():
            Sent(project=project, code=code_tags(code_version())).save(self._folder)
        process: MlflowProcess | _SyncThread | None = take(home)
        if process is None and "mlflow" not in sys.modules:
            with suppress(OSError):  # the system starts no further process
                process = MlflowProcess(home)
        if process is None:
            with suppress(ImportError):  # the thread reports it
                # Not in the thread, because two threads that import interdependent libraries can deadlock.
                load_mlflow()
            process = _SyncThread(home)
        process.begin(run)
        self._process = process

    def notify(self) -> None:
        """Say that the folder has something new."""
        self._process.more()

    def close(self) -> bool:
        """Stop recording, and return whether MLflow has all of the run."""
        process = self._process
        process.end()
        process.imported.wait()
        before: Sent | None = None
        while process.is_alive() and (now := Sent.load(self._folder)) != before:
            before = now
            process.join(CLOSE_SECONDS)
        process.kill()
        return not is_left(self._folder)

    def settle(self, stages: Collection[str]) -> None:
        """Wait until `stages` have their pages in MLflow: a few seconds at most, and only while it answers."""
        process = self._process
        process.more()
        deadline = time.monotonic() + SETTLE_SECONDS
        while has_pages(self._home) and process.answers and process.is_alive() and time.monotonic() < deadline:
            if set(stages) <= Sent.load(self._folder).stages.keys():
                return
            time.sleep(0.05)


class _SyncThread(threading.Thread):
    """Sends a run's folder until the run ends, and once more after that: as a thread with the methods of
    `MlflowProcess`, or not started, in `serve`'s process."""

    def __init__(self, home: Path, heard: Callable[[bool], object] = lambda answers: None) -> None:
        """`heard` is told whether MLflow accepts data, each time that this changes."""
        super().__init__(name="tracking", daemon=True)
        self._home, self._heard, self._run = home, heard, ""
        self._closing, self._more = threading.Event(), threading.Event()
        self._recorder: Recorder | None = None
        self.answers, self.imported = True, threading.Event()
        self.imported.set()

    def open(self) -> None:
        """Open MLflow's database if there is one. An error is raised again, and reported, once there is a run."""
        path = database_file(self._home)
        if path is not None and path.is_file():
            with suppress(Exception):
                self._recorder = Recorder(self._home)

    def begin(self, run: str) -> None:
        self._run = run
        self.start()

    def run(self) -> None:
        self.send(self._run)

    def more(self) -> None:
        self._more.set()

    def end(self) -> None:
        self._closing.set()
        self._more.set()

    def kill(self) -> None:
        """Nothing ends a thread: it ends with the process."""

    def send(self, run: str) -> None:
        """Send the folder of `run`; return when it has ended."""
        folder = self._home / "runs" / run
        left: list[Path] | None = None
        with held(folder, wait=True):
            while True:
                last = self._closing.is_set()
                self._more.clear()
                try:
                    recorder = self._recorder = self._recorder or Recorder(self._home)
                    left = left_behind(self._home) if left is None else left
                    while left:
                        send_rest(recorder, left[0])
                        left.pop(0)
                    recorder.synchronize(folder, last)
                    self._set(True)
                except Exception as error:  # any MLflow exception: the data stay on disk, and a warning says so
                    logger.debug("MLflow", exc_info=True)
                    if self.answers:
                        left_in = f"What it does not have yet stays in {folder}."
                        logger.warning("MLflow did not answer (%s). %s", in_short(error), left_in)
                    self._set(False)
                if last:
                    return
                if self.answers:
                    self._more.wait(EVERY_SECONDS)
                else:
                    self._closing.wait(RETRY_SECONDS)

    def _set(self, answers: bool) -> None:
        if answers != self.answers:
            self.answers = answers
            self._heard(answers)


def serve() -> NoReturn:
    """Be the process that `tasks.tracking.mlflow_process` starts."""
    gc.disable()  # imports make many objects and no garbage
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the run still has to tell MLflow how it ended
        signal.signal(number, signal.SIG_IGN)
    answers_out = os.fdopen(int(sys.argv[2]), "w")

    def tell(document: Mapping[str, object]) -> None:
        answers_out.write(json.dumps(document) + "\n")
        answers_out.flush()

    thread = _SyncThread(Path(sys.argv[1]), lambda answers: tell({"answers": answers}))
    messages = queue.SimpleQueue[Any]()
    threading.Thread(target=_listen, args=(thread, messages), daemon=True).start()
    with suppress(ImportError):  # reported once there is a run
        load_mlflow()
    tell({"imported": True})
    thread.open()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    first = messages.get()
    logging.getLogger().addHandler(_RunLog(tell))
    logging.getLogger().setLevel(first["level"])
    try:
        thread.send(first["run"])
    except Exception:
        logger.warning("MLflow does not have all of run %s", first["run"], exc_info=True)
    os._exit(0)


def _listen(thread: _SyncThread, messages: "queue.SimpleQueue[Any]") -> None:
    """Read what the run says. Its end ends this process, whatever this process does at the time."""
    for line in sys.stdin:
        if line == "end\n":
            thread.end()
        elif line == "more\n":
            thread.more()
        else:
            messages.put(json.loads(line))
    os._exit(1)


class _RunLog(logging.Handler):
    """Gives the log records of this process to the run, which prints them."""

    def __init__(self, tell: Callable[[Mapping[str, object]], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        fields = ("name", "levelno", "levelname", "pathname", "lineno", "funcName", "created", "process")
        text = self.format(record)
        self._tell({name: getattr(record, name) for name in fields} | {"msg": text})


def send_rest(recorder: Recorder, folder: Path) -> Exception | None:
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
