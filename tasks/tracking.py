"""Facts on their way to MLflow. Nothing waits for it: a run writes facts down, and a thread carries them in order.

What MLflow can't take stays on disk; the next run's thread, or `tether sync`, carries what earlier runs left first.
"""

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from components.process import is_alive, this_process
from tasks import journal
from tasks.journal import Done, Sent
from tasks.lineage import run_link
from tasks.mlflow_client import load_mlflow, tracking_uri
from tasks.recording import Recorder
from tasks.result import StageResult
from tasks.spool import points_after, points_file
from tasks.status import list_runs, load_status

logger = logging.getLogger(__name__)

EVERY_SECONDS = 2.0
RETRY_SECONDS = 10.0
CLOSE_SECONDS = 20.0
"""How long a run that is done waits for what is still on its way, where MLflow answers; else it waits for nothing."""
BATCH_POINTS = 200


class Tracker:
    """One run's facts, and the thread that carries them. No call here waits for MLflow but `close`, and that not long.

    Args:
        home: the `TETHER_HOME`.
        run: our run id.
    """

    def __init__(self, home: Path, run: str) -> None:
        self._home = home
        self._folder = home / "runs" / run
        self._closing = threading.Event()
        self._more = threading.Event()
        self._thread = threading.Thread(target=self._carry, name="tracking", daemon=True)

    def open(self, project: str, profile: str) -> None:
        """The run begins, or is taken up."""
        journal.mend_facts(self._folder)
        self._add("open", project=project, profile=profile, process=this_process())
        with suppress(ImportError):  # the thread says so
            # Not in the thread: two threads that import libraries which need each other can trip over them.
            load_mlflow()
        self._thread.start()

    def begin(self, stage: str) -> None:
        """A stage begins, or is taken up."""
        self._add("begin", stage=stage, process=this_process())

    def record(self, result: StageResult, step: int, attachments: Mapping[str, Path]) -> None:
        """A stage is done.

        Args:
            result: what came out.
            step: where final metrics stand: after the last step of the curves.
            attachments: files by name (empty on a hit).
        """
        done = Done.of(result, step, attachments, by=self._folder.name)
        self._add("record", stage=result.name, done=done.model_dump(mode="json"))

    def card(self, stage: str, path: Path) -> None:
        """A card of the model that a stage gave is in the run's folder."""
        self._add("card", stage=stage, path=path.relative_to(self._folder).as_posix())

    def end(self, stage: str, state: str) -> None:
        """A stage ends in one of our states."""
        self._add("end", stage=stage, state=state)

    def close(self, state: str, stages: Iterable[Mapping[str, Any]]) -> tuple[int, int]:
        """The run ends. Returns how many facts and points stay behind: whatever MLflow doesn't take by now."""
        add_close(self._folder, state, stages)
        self._closing.set()
        self._more.set()
        self._thread.join(CLOSE_SECONDS)
        return journal.waiting(self._folder)

    def address(self, stage: str) -> str | None:
        """Where a person finds a stage's run, if MLflow is a server and has it by now (a database has no page)."""
        uri, sent = tracking_uri(self._home), Sent.load(self._folder)
        if not uri.startswith("http") or sent.experiment is None or stage not in sent.stages:
            return None
        return f"{uri.rstrip('/')}/{run_link(sent.experiment, sent.stages[stage])}"

    def _add(self, kind: str, **about: Any) -> None:
        journal.add_fact(self._folder, kind, **about)
        self._more.set()

    def _carry(self) -> None:
        """The thread: as long as the run, and once more at its end."""
        with ExitStack() as stack:
            stack.enter_context(journal.held(self._folder, wait=True))
            carrier, answered = Carrier(self._home), True
            while True:
                last = self._closing.is_set()
                self._more.clear()
                try:
                    carrier.carry_earlier(self._folder)
                    carrier.carry(self._folder)
                    answered = True
                except Exception as error:  # whatever MLflow raises: all of it is on disk, and this is said
                    logger.debug("MLflow", exc_info=True)
                    if answered:
                        logger.warning("MLflow, %s; what it hasn't got waits in %s", _in_short(error), self._folder)
                    answered = False
                if last:
                    return
                if answered:
                    self._more.wait(EVERY_SECONDS)
                else:
                    self._closing.wait(RETRY_SECONDS)


class Carrier:
    """Carries runs' facts and points to MLflow, each run's in the order in which they were written."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._recorder: Recorder | None = None
        self._earlier: list[Path] | None = None

    def carry(self, folder: Path) -> None:
        """Carry what waits of one run. What MLflow has taken is noted at once.

        Raises:
            Exception: MLflow did not take something; that and all after it stays.
        """
        sent = Sent.load(folder)
        while True:
            facts, end = journal.facts_after(folder, sent.facts, limit=1)
            if not facts:
                break
            kind = facts[0]["kind"]
            if kind in ("record", "end"):  # a curve comes before its end
                self._carry_points(folder, facts[0]["stage"], sent)
            self._mlflow().apply(facts[0], folder, sent)
            sent.facts, sent.closed = end, kind == "close"
            sent.save(folder)
        for stage in sent.stages:
            self._carry_points(folder, stage, sent)

    def carry_earlier(self, own: Path | None = None) -> None:
        """Carry what ended runs have left, the oldest first.

        Raises:
            Exception: MLflow doesn't answer.
        """
        if self._earlier is None:
            self._earlier = [folder for folder in left_behind(self._home) if folder != own]
        while self._earlier:
            self.carry_one(self._earlier[0])
            self._earlier.pop(0)

    def carry_one(self, folder: Path) -> Exception | None:
        """Carry what an ended run has left, unless another process does.

        Returns:
            What MLflow has against this run (it was deleted there, say), which is no reason to hold back others.

        Raises:
            Exception: MLflow doesn't answer.
        """
        with journal.held(folder, wait=False) as mine:
            if not mine:
                return None
            _end_the_dead(self._home, folder)
            try:
                self.carry(folder)
            except Exception as error:
                if self._recorder is None:
                    raise
                self._recorder.check()
                logger.warning("MLflow does not take what is left of run %s: %s", folder.name, _in_short(error))
                return error
            logger.info("what run %s had left is in MLflow now", folder.name)
            return None

    def _mlflow(self) -> Recorder:
        if self._recorder is None:
            self._recorder = Recorder(self._home)
        return self._recorder

    def _carry_points(self, folder: Path, stage: str, sent: Sent) -> None:
        while True:
            begin = sent.points.get(stage, 0)
            points, end = points_after(points_file(folder, stage), begin, BATCH_POINTS)
            if not points:
                return
            self._mlflow().ship(sent.stages[stage], points)
            sent.points[stage] = end
            sent.save(folder)


def left_behind(home: Path) -> list[Path]:
    """Folders of the runs that have ended, or died, and that MLflow has not got the whole of; the oldest first."""
    return [folder for folder in (home / "runs" / run for run in reversed(list_runs(home))) if _is_left(folder)]


def sync(home: Path) -> Iterator[tuple[str, Exception | None]]:
    """Carry what is left behind, the oldest run first. Gives each run with what MLflow has against it, if anything.

    What another process is carrying just now is left to it.

    Raises:
        Exception: MLflow doesn't answer.
    """
    carrier = Carrier(home)
    for folder in left_behind(home):
        yield folder.name, carrier.carry_one(folder)


def add_close(folder: Path, state: str, stages: Iterable[Mapping[str, Any]]) -> None:
    """Write down that the run in `folder` has ended."""
    shown = [{name: stage[name] for name in ("name", "state", "digest")} for stage in stages]
    journal.add_fact(folder, "close", state=state, stages=shown)


def _is_left(folder: Path) -> bool:
    if journal.is_whole(folder):
        return False
    facts = journal.read_facts(folder)
    if not facts:
        return False
    at_work = is_alive(next(fact["process"] for fact in reversed(facts) if "process" in fact))
    return facts[-1]["kind"] == "close" or not at_work


def _end_the_dead(home: Path, folder: Path) -> None:
    """Write down the end of a run whose process was killed before it could."""
    journal.mend_facts(folder)
    facts = journal.read_facts(folder)
    if facts[-1]["kind"] == "close":
        return
    open_stages: dict[str, None] = {}
    for fact in facts:
        if fact["kind"] == "begin":
            open_stages[fact["stage"]] = None
        elif fact["kind"] == "end":
            open_stages.pop(fact["stage"], None)
    for stage in open_stages:
        journal.add_fact(folder, "end", stage=stage, state="interrupted")
    status = load_status(home, folder.name)
    add_close(folder, status["state"], status["stages"])


def _in_short(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0][:300]
    return f"{type(error).__name__}: {line}"
