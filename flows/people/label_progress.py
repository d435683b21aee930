"""Progress of a run's labels: count them, show the count, and start scoring after the last one."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from components.base.errors import TetherError, UserError
from components.human_eval.returned_labels import Sample
from components.human_eval.sheet import RATERS
from flows.config.removed import without_removed
from flows.config.run_config import check_config
from flows.people.rater_sheets import files_of
from flows.review.review_batches import sample_folder
from tasks.runs.awaited_labels import LabelProgress, read_progress, write_progress
from tasks.runs.config import run_values
from tasks.runs.status import load_status
from tasks.stages import PIPELINE

logger = logging.getLogger(__name__)


SCORING_LOG = "scoring.log"
"""The output of scoring that was started automatically, in a run's folder."""


def progress_of_files(home: Path, run: str, sheets: Path | Sequence[Path] | None = None) -> LabelProgress:
    """Return the progress of a run's labels, counted in its raters' files.

    Args:
        sheets: as in `joined`; None takes the run's folder of raters' files.

    Raises:
        UserError: the run has no sample.
        Mistakes: as `Sample.ratings`.
    """
    opened = Sample.open(sample_folder(home, run))
    paths = home / "runs" / run / RATERS if sheets is None else sheets
    files = [file for path in ([paths] if isinstance(paths, Path) else paths) for file in files_of(path)]
    labels = opened.answers(*files, may_be_empty=True).ratings
    items = len(opened.policy_side)
    raters = {
        f"rater {number}": (sum(bool(ratings[number - 1]) for ratings in labels.values()), items)
        for number in range(1, opened.raters + 1)
    }
    return LabelProgress(sum(done for done, _ in raters.values()), items * opened.raters, "", raters)


def labels_progress(
    home: Path, run: str, sheets: Path | Sequence[Path] | None = None, database: str | None = None
) -> LabelProgress:
    """Return the progress of a run's labels from its review page (in `database`, None: that in the home) if it has more
    answers, else from the raters' files (`sheets`, if given).

    Arguments and errors are those of `progress_of_files`.
    """
    from flows.review.answer_progress import progress_of_run  # SQLAlchemy

    files = progress_of_files(home, run, sheets)
    page = progress_of_run(home, run, database)
    return page if page is not None and page.answered > files.answered else files


def show_progress(home: Path, run: str, progress: LabelProgress, say: Callable[[str], None] = logger.warning) -> None:
    """Show the progress of a run's labels in its folder and on its Prefect page.

    An address from an earlier call stays. If the server is away, `say` reports it and the next call catches up.
    """
    folder = home / "runs" / run
    before = read_progress(folder)
    if before is not None and not progress.address:
        progress = replace(progress, address=before.address)
    write_progress(folder, progress)
    page = load_status(home, run).prefect
    if not page or not os.environ.get("PREFECT_API_URL"):
        return
    from tasks.prefect_flow import prefect_labels
    from tasks.prefect_flow.server import is_answering

    try:
        if not is_answering():  # its client would retry for minutes
            raise TetherError("its server does not answer")
        prefect_labels.show_progress(page, run, progress)
    except Exception as error:  # labelling must continue even if a page is out of date
        say(f"Prefect did not receive the progress of run {run}'s labels ({type(error).__name__}: {error})")


def begin_waiting(home: Path, run: str, say: Callable[[str], None]) -> None:
    """Show that a run waits for labels. Errors in sheets that were filled in earlier are reported, not raised.

    Args:
        say: gets a line for the user who began the run.
    """
    try:
        progress = labels_progress(home, run)
    except UserError as error:
        say(f"The labels of run {run} can't be counted: {error}")
        return
    show_progress(home, run, progress, say)


def when_complete(home: Path, run: str, sheets: Path, say: Callable[[str], None] = logger.warning) -> str:
    """Act on the last label of a run as `human_eval.when_complete` says.

    `score`: if the run is on a Prefect server that has the deployment `human-eval/score`, a worker scores it; otherwise
    a new process does, which writes to `scoring.log` in the run's folder. The run then ends as `passed` or
    `gate_failed`. A run that is being scored already is left alone.

    Args:
        sheets: the raters' files or a folder of them.

    Returns:
        A sentence that says what happens next.
    """
    status = load_status(home, run)
    command = f"tether people score {sheets} --run {run}"
    if (state := status.stage("human_eval").state) in ("not_run", "running", "interrupted"):
        return f"Run {run} can't be scored now (human_eval: {state}). Score it later: {command}"
    values = without_removed(run_values(home, run), f"run {run}", PIPELINE)
    if check_config(values, source=f"run {run}").human_eval.when_complete == "wait":
        return f"The labels are complete. Score them: {command}"
    if status.prefect and os.environ.get("PREFECT_API_URL"):
        from tasks.prefect_flow.prefect_labels import order_scoring

        try:
            if (page := order_scoring(run, sheets.absolute())) is not None:
                return f"The labels are complete. A worker scores them: {page}"
        except Exception as error:
            failed = f"Prefect could not be asked to score run {run} ({type(error).__name__}: {error})"
            say(f"{failed}; this machine scores it")
    log = home / "runs" / run / SCORING_LOG
    with log.open("ab") as output:
        subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "people", "score", str(sheets.absolute()), "--run", run],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            env=os.environ | {"TETHER_HOME": str(home.absolute())},
        )  # fmt: skip
    return f"The labels are complete, and are being scored. The output goes to {log}."
