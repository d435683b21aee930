"""Progress of a run's labels: counted, shown on its pages, and scored after the last one."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from components.base.errors import Mistakes, TetherError, UserError
from components.human_eval.labels import Sample
from components.human_eval.sheet import RATERS, rating_columns
from components.store.store import ArtifactStore, Record
from flows.config.run_config import check_config
from flows.people.sheets import files_of
from tasks.runs.config import run_values
from tasks.runs.labels import LabelProgress, read_progress, write_progress
from tasks.runs.status import load_status

if TYPE_CHECKING:
    from flows.review.progress import ReviewProgress


logger = logging.getLogger(__name__)


SCORING_LOG = "scoring.log"
"""What a scoring that began by itself says, in a run's folder."""


def progress_of_files(home: Path, run: str, sheets: Path | Sequence[Path] | None = None) -> LabelProgress:
    """Return the progress of a run's labels, from its raters' files.

    Args:
        sheets: as `joined`; None for the folder of the run that raters' files were given out in.

    Raises:
        UserError: the run has no sample. Mistakes: as `Sample.ratings`.
    """
    status, store = load_status(home, run), ArtifactStore(home)
    stage = status.stage("human_eval")
    part = stage.parts.get("human_eval.sample")
    sample = store.lookup(part.key, part.digest) if part is not None and part.digest else None
    if not isinstance(sample, Record):
        raise UserError(f"run {run} has no sample to label (human_eval: {stage.state}). Name the run that does.")
    opened = Sample.open(store.path(sample))
    given = home / "runs" / run / RATERS if sheets is None else sheets
    files = [file for path in ([given] if isinstance(given, Path) else given) for file in files_of(path)]
    try:
        labels = opened.ratings(*files)
    except Mistakes:
        raise
    except UserError as error:
        if "holds no rating yet" not in str(error):
            raise
        labels = {}
    items = len(opened.policy_side)
    raters = {
        f"rater {number}": (sum(bool(each[number - 1]) for each in labels.values()), items)
        for number, _ in enumerate(rating_columns(opened.raters), 1)
    }
    return LabelProgress(sum(done for done, _ in raters.values()), items * opened.raters, "", raters)


def of_page(found: "ReviewProgress") -> LabelProgress:
    """Return what a review page says of its batch."""
    return LabelProgress(found.answered, found.slots, found.address)


def labels_progress(home: Path, run: str, sheets: Path | Sequence[Path] | None = None) -> LabelProgress:
    """Return the progress of a run's labels, from its review page if that has more than the raters' files.

    Args, Raises: as `progress_of_files`.
    """
    from flows.review.progress import progress_of_run  # SQLAlchemy

    files = progress_of_files(home, run, sheets)
    page = None if sheets else progress_of_run(home, run)
    return of_page(page) if page is not None and page.answered > files.answered else files


def show_progress(home: Path, run: str, progress: LabelProgress, say: Callable[[str], None] = logger.warning) -> None:
    """Show the progress of a run's labels in its folder, on its Prefect page and in MLflow.

    An address that an earlier call named stays. A server that is away misses this and nothing else: it is said, and
    the next call catches up.

    Args:
        say: takes a line for whoever waits.
    """
    folder = home / "runs" / run
    before = read_progress(folder)
    if before is not None and not progress.address:
        progress = progress._replace(address=before.address)
    write_progress(folder, progress)

    def on_prefect() -> None:
        page = load_status(home, run).prefect
        if page and os.environ.get("PREFECT_API_URL"):
            from tasks.prefect_flow import labels
            from tasks.prefect_flow.server import is_answering

            if not is_answering():  # its client would try for minutes
                raise TetherError("its server does not answer")
            labels.show_progress(page, run, progress)

    def in_mlflow() -> None:
        from tasks.tracking.labels import log_progress

        log_progress(home, run, progress)

    for where, tell in (("Prefect", on_prefect), ("MLflow", in_mlflow)):
        try:
            tell()
        except Exception as error:  # a page that lags must not stop those who label
            say(f"{where} did not receive the progress of run {run}'s labels ({type(error).__name__}: {error})")


def begin_waiting(home: Path, run: str, say: Callable[[str], None]) -> None:
    """Show that a run waits for labels; report mistakes in files that were filled in before, without an error.

    Args:
        say: takes a line for whoever began the run.
    """
    try:
        progress = labels_progress(home, run)
    except UserError as error:
        say(f"The labels of run {run} can't be counted: {error}")
        return
    show_progress(home, run, progress, say)


def when_complete(home: Path, run: str, sheets: Path, say: Callable[[str], None] = logger.warning) -> str:
    """Follow the last label of a run as its `human_eval.when_complete` says.

    `score`: where the run stands on a Prefect server that has the deployment `human-eval/score`, a worker scores it;
    else a process of its own does, which writes to `scoring.log` in the run's folder. The run then ends as `passed` or
    `gate_failed`. A run that is just being scored is left alone.

    Args:
        sheets: the raters' files or a folder of them.

    Returns:
        What follows, in a sentence.
    """
    status = load_status(home, run)
    command = f"tether human-eval score {sheets} --run {run}"
    if (state := status.stage("human_eval").state) in ("not_run", "running", "interrupted"):
        return f"Run {run} can't be scored now (human_eval: {state}). When it can be: {command}"
    if check_config(run_values(home, run), source=f"run {run}").human_eval.when_complete == "wait":
        return f"The labels are complete. Score them: {command}"
    if status.prefect and os.environ.get("PREFECT_API_URL"):
        from tasks.prefect_flow.labels import order_scoring

        try:
            if (page := order_scoring(run, sheets.absolute())) is not None:
                return f"The labels are complete. A worker scores them: {page}"
        except Exception as error:
            say(f"Prefect could not be asked to score run {run} ({type(error).__name__}: {error}); this machine does")
    log = home / "runs" / run / SCORING_LOG
    with log.open("ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "human-eval", "score", str(sheets.absolute()), "--run", run],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {"TETHER_HOME": str(home.absolute())},
        )  # fmt: skip
    return f"The labels are complete, and are being scored. The output goes to {log}."
