"""Export batches and candidates to other tools, and import Label Studio's votes on candidates."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import Mistakes, UserError
from components.base.files import make_folder, write_whole
from components.base.jsonl import read_rows, write_rows
from components.human_eval.batch.label_studio import instruction, labelling_config, tasks
from components.human_eval.batch.reading import parse_sheet
from components.human_eval.batch.texts import plain
from components.human_eval.config import GUIDELINES
from components.human_eval.sample import as_text
from components.human_eval.sheet import MEANINGS, TEXTS, SheetInfo


class Exported(NamedTuple):
    """The files that were written for another tool."""

    items: int
    files: tuple[Path, ...]
    """First the file of items, then the files that belong to it."""


def export(batch: Path, kind: str, out: Path) -> Exported:
    """Write a batch for another tool, without showing which model wrote which reply.

    Args:
        batch: a sample artifact, or a folder of candidates (`tether data candidates`).
        kind: `label-studio` (a file of tasks, with the labelling config as `.xml` and the guidelines as `.html` for the
            project's instruction), `csv` or `jsonl`.

    Raises:
        UserError: `batch` is neither.
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
    """Write Label Studio's votes on candidates as rows that `data.preferences` reads, one per pair.

    Returns:
        The number of pairs that have votes.

    Raises:
        UserError: the candidates or the export can't be read.
        Mistakes: everything that is wrong in the export, by row: errors of `parse_sheet`, pairs of other candidates,
            and texts that differ from the exported ones.
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
                f"{where}: {row.item[:40]!r} is not a pair of {candidates}. Give the export of these candidates."
            )
        elif row.item in votes:
            mistakes.append(f"{where}: {row.item} appears twice. Keep only one of the tasks.")
        elif any(plain(own) != plain(back) for own, back in zip(_texts_of(pair), row[1:5], strict=True)):
            mistakes.append(
                f"{where}: the texts of {row.item} differ from the exported ones. Export and label it again."
            )
        else:
            given = enumerate(row.ratings, 1)
            votes[row.item] = [{"annotator": f"rater {n}", "label": label} for n, label in given if label]
    if mistakes:
        raise Mistakes(*mistakes)
    write_rows(out, ({**pair, "votes": votes[name]} for name, pair in pairs.items() if votes.get(name)))
    return sum(map(bool, votes.values()))


def _texts_of(pair: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return what raters see of a pair of candidates: its name, the prompt and both replies."""
    return pair["id"], as_text(pair["prompt"]), pair["a"], pair["b"]
