"""Sheets on their way to the raters and back: what a run's folder gets for them, and their answers in one file."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from components.base.errors import Mistakes, UserError
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
from components.human_eval.sheet import GUIDELINES_FILE, MEANINGS, RATERS, TEXTS, SheetInfo
from components.store.store import ArtifactStore, Record
from flows.config.run_config import RunConfig

LABELS = "labels.csv"
"""What raters answered, in a run's folder."""
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
