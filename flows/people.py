"""Sheets on their way to the raters and back: what a run's folder gets for them, how far they are, and their answers in
one file.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from components.base.errors import Mistakes, TetherError, UserError
from components.base.files import make_folder, replacing, write_whole
from components.base.jsonl import read_rows, write_rows
from components.base.paths import user_path
from components.human_eval.batch.label_studio import instruction, labelling_config, tasks
from components.human_eval.batch.reading import parse_sheet
from components.human_eval.batch.texts import plain
from components.human_eval.config import GUIDELINES, HumanEvalConfig
from components.human_eval.labels import Sample
from components.human_eval.results.seconds import as_cells, read_seconds
from components.human_eval.sample import as_text
from components.human_eval.sheet import GUIDELINES_FILE, MEANINGS, RATERS, TEXTS, SheetInfo, rating_columns
from components.store.store import ArtifactStore, Record
from flows.config.run_config import RunConfig, check_config
from tasks.runs.config import run_values
from tasks.runs.labels import LabelProgress, read_progress, write_progress
from tasks.runs.status import load_status

if TYPE_CHECKING:
    from flows.review.progress import ReviewProgress

logger = logging.getLogger(__name__)

LABELS = "labels.csv"
"""What raters answered, in a run's folder."""
SCORING_LOG = "scoring.log"
"""What a scoring that began by itself says, in a run's folder."""
_KINDS = (".csv", ".tsv", ".txt", ".json", ".jsonl")


def with_guidelines(config: RunConfig) -> RunConfig:
    """`config` with the text of `human_eval.guidelines`, a file, as its `instructions`: the run keeps what was read.

    Raises:
        UserError: the file can't be read, is no text in UTF-8, is empty or too long.
    """
    field, given = "human_eval.guidelines", config.human_eval.guidelines
    if given is None:
        return config
    path = user_path(given, field)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"{field} = {given}: this can't be read: {error.strerror}. Name a text or Markdown file."
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"{field} = {given}: this is no text in UTF-8. Save it as UTF-8 and start again.") from error
    try:
        values = config.human_eval.model_dump() | {"instructions": text, "guidelines": None}
        return config.model_copy(update={"human_eval": HumanEvalConfig.model_validate(values)})
    except ValidationError as error:
        raise UserError(f"{field} = {given}: {error.errors()[0]['msg']}.") from error


def give_out(sample: Path, folder: Path) -> None:
    """Copy the sheet, the guidelines and the raters' own files of a sample artifact into a run's folder.

    What is there stays: the files of a run that is taken up again may hold answers by now.
    """
    own = sorted((sample / RATERS).glob("*.csv"))
    given = [(sample / name, folder / name) for name in ("sheet.csv", GUIDELINES_FILE)]
    for source, copy in [*given, *((each, folder / RATERS / each.name) for each in own)]:
        if not copy.exists():
            make_folder(copy.parent)
            write_whole(copy, source.read_bytes())


class Exported(NamedTuple):
    """What was written for another tool."""

    items: int
    files: tuple[Path, ...]
    """The items first; what belongs to them after it."""


def export(batch: Path, kind: str, out: Path) -> Exported:
    """Write a batch for another tool; nothing of it tells who wrote which reply.

    Args:
        batch: a sample artifact, or a folder of candidates (`tether data candidates`).
        kind: `label-studio` (tasks, and beside them the labelling config as `.xml` and the guidelines as `.html`,
            for the project's instruction), `csv` or `jsonl`.

    Raises:
        UserError: the folder is neither.
    """
    sheet, pairs = batch / "sheet.jsonl", batch / "pairs.jsonl"
    if not sheet.is_file() and not pairs.is_file():
        raise UserError(
            f"{batch}: neither a batch to judge nor candidates to label (no pairs.jsonl). Name one of them."
        )
    make_folder(out.parent)
    source = sheet if sheet.is_file() else pairs
    rows = read_rows(source)
    if kind != "label-studio":
        write_whole(out, (source if kind == "jsonl" else source.with_suffix(".csv")).read_bytes())
        return Exported(len(rows), (out,))
    if source == sheet:
        about: SheetInfo = json.loads((batch / "sheet.json").read_text(encoding="utf-8"))
        ratings, criteria, guidelines = about["ratings"], about.get("criteria", []), about.get("guidelines", GUIDELINES)
    else:
        rows = [dict(zip(TEXTS, _texts_of(row), strict=True)) for row in rows]
        ratings, criteria, guidelines = list(MEANINGS), [], GUIDELINES
    config, instructed = out.with_suffix(".xml"), out.with_suffix(".html")
    write_whole(out, (json.dumps(tasks(rows), ensure_ascii=False, indent=1) + "\n").encode("utf-8", "surrogatepass"))
    write_whole(config, labelling_config(ratings, criteria).encode())
    write_whole(instructed, instruction(guidelines).encode())
    return Exported(len(rows), (out, config, instructed))


def import_votes(candidates: Path, export: Path, out: Path) -> int:
    """Write Label Studio's votes on candidates as rows that `data.preferences` reads, a pair each; how many have votes.

    Raises:
        UserError: the candidates or the export can't be read. Mistakes: all that is wrong in the export, by row: as
            `parse_sheet`, pairs of other candidates, texts that are not those exported.
    """
    file = candidates / "pairs.jsonl"
    if not file.is_file():
        raise UserError(f"{candidates}: no candidates to label (no pairs.jsonl). Name the folder that was exported.")
    pairs = {row["id"]: row for row in read_rows(file)}
    sheet = parse_sheet(export, 1, list(MEANINGS))
    mistakes, votes = list(sheet.mistakes), {}
    for row in sheet.rows:
        where, pair = f"{export}, row {row.number}", pairs.get(row.item)
        if pair is None:
            mistakes.append(
                f"{where}: {row.item[:40]!r} is no pair of {candidates}. Give the export of these candidates."
            )
        elif row.item in votes:
            mistakes.append(f"{where}: {row.item} stands there twice. Keep one of the tasks.")
        elif any(plain(own) != plain(back) for own, back in zip(_texts_of(pair), row[1:5], strict=True)):
            mistakes.append(f"{where}: the texts of {row.item} are not those exported. Export and label it again.")
        else:
            given = enumerate(row.ratings, 1)
            votes[row.item] = [{"annotator": f"rater {n}", "label": label} for n, label in given if label]
    if mistakes:
        raise Mistakes(*mistakes)
    write_rows(out, ({**pair, "votes": votes[name]} for name, pair in pairs.items() if votes.get(name)))
    return sum(map(bool, votes.values()))


def _texts_of(pair: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """A pair of candidates as raters read it: its name, the prompt, and both replies."""
    return pair["id"], as_text(pair["prompt"]), pair["a"], pair["b"]


def joined(folder: Path, store: ArtifactStore, sample: Record | None, sheets: Path | Sequence[Path]) -> Path:
    """Check what raters returned, and write their answers as one sheet, `labels.csv`, into a run's folder.

    The same answers give the same bytes, in whatever files they came, and so the same key.

    Returns:
        That file; the one given file itself where the store has lost the sample, which the stage then makes again.

    Raises:
        UserError: there is no such file. Mistakes: as `Sample.ratings`.
    """
    files = [file for path in ([sheets] if isinstance(sheets, Path) else sheets) for file in _files(path)]
    artifact = None if sample is None else store.path(sample)
    if artifact is None or not (artifact / "sheet.json").is_file():
        if len(files) == 1:
            return files[0]
        raise UserError(
            "the sample that these sheets were made of is not whole in the store any more, so they can't be joined. "
            "Rerun human_eval, which makes it again."
        )
    opened = Sample.open(artifact)
    answers = opened.answers(*files)
    seconds = read_seconds(files, opened.raters)
    further = (
        {item: as_cells(seconds, item, opened.raters) for item in answers.ratings | answers.attention}
        if seconds
        else None
    )
    with replacing(folder / LABELS) as temporary:
        opened.write(temporary, answers, further)
    return folder / LABELS


def _files(path: Path) -> list[Path]:
    """A returned file, or those of a folder."""
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix.lower() in _KINDS and each.name[0] not in ".~")
        if found:
            return found
        raise UserError(f"{path}: the folder holds no sheet ({', '.join(_KINDS)}). Give the raters' filled files.")
    if not path.is_file():
        raise UserError(f"{path}: there is no such file. Give the filled rating sheet (CSV or JSONL).")
    return [path]


def progress_of_files(home: Path, run: str, sheets: Path | Sequence[Path] | None = None) -> LabelProgress:
    """How far the labels of a run are, by its raters' files.

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
    files = [file for path in ([given] if isinstance(given, Path) else given) for file in _files(path)]
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
    """What a review page says of its batch."""
    return LabelProgress(found.answered, found.slots, found.address)


def labels_progress(home: Path, run: str, sheets: Path | Sequence[Path] | None = None) -> LabelProgress:
    """How far the labels of a run are: by its review page where that has more of them than the raters' files.

    Args, Raises: as `progress_of_files`.
    """
    from flows.review.progress import progress_of_run  # SQLAlchemy

    files = progress_of_files(home, run, sheets)
    page = None if sheets else progress_of_run(home, run)
    return of_page(page) if page is not None and page.answered > files.answered else files


def show_progress(home: Path, run: str, progress: LabelProgress, say: Callable[[str], None] = logger.warning) -> None:
    """Show how far the labels of a run are: in its folder, on its Prefect page, in MLflow.

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
            say(f"{where} was not told how far the labels of run {run} are ({type(error).__name__}: {error})")


def begin_waiting(home: Path, run: str, say: Callable[[str], None]) -> None:
    """Show that a run waits for labels; what is wrong in files that were filled in before is said, and stops nothing.

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
    return f"The labels are complete, and are being scored. {log} has what it says."
