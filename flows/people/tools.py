"""Write batches as tasks for Label Studio, and read its export's votes on candidates."""

import json
from collections.abc import Mapping
from pathlib import Path

from components.base.errors import Mistakes, UserError
from components.base.files import make_folder, write_whole
from components.human_eval.batch.label_studio import instruction, labelling_config, tasks
from components.human_eval.batch.returned_sheets import parse_sheet
from components.human_eval.batch.returned_texts import plain
from components.human_eval.sheet import TEXTS
from flows.review.review_batches import BatchSource


def write_tasks(batch: BatchSource, out: Path) -> tuple[Path, ...]:
    """Write a batch as Label Studio's tasks, without showing which model wrote which reply.

    Returns:
        The files: the tasks, the labelling config (`.xml`), and the guidelines for the project's instruction (`.html`).
    """
    rows = tasks(dict(zip(TEXTS, pair, strict=True)) for pair in batch.pairs)
    content = {
        out: json.dumps(rows, ensure_ascii=False, indent=1) + "\n",
        out.with_suffix(".xml"): labelling_config(batch.ratings, batch.criteria),
        out.with_suffix(".html"): instruction(batch.guidelines),
    }
    make_folder(out.parent)
    for file, text in content.items():
        write_whole(file, text.encode("utf-8", "surrogatepass"))
    return tuple(content)


def read_votes(batch: BatchSource, export: Path) -> Mapping[str, list[dict[str, str]]]:
    """Return the votes in Label Studio's export of a batch of pairs: by item, each with `annotator` and `label`.

    Raises:
        UserError: the export can't be read, or the batch is a run's.
        Mistakes: everything that is wrong in the export, by row: errors of `parse_sheet`, pairs of another batch, and
            texts that differ from the batch's.
    """
    if batch.kind == "sample":
        raise UserError(f"{batch.name} is a run, which is scored: tether people score {export} --run {batch.name}")
    pairs = {pair.name: pair for pair in batch.pairs}
    sheet = parse_sheet(export, 1, batch.ratings)
    mistakes, votes = list(sheet.mistakes), dict[str, list[dict[str, str]]]()
    for row in sheet.rows:
        where, pair = f"{export}, row {row.number}", pairs.get(row.item)
        if pair is None:
            mistakes.append(
                f"{where}: {row.item[:40]!r} is not a pair of {batch.place}. Give the export of these pairs."
            )
        elif row.item in votes:
            mistakes.append(f"{where}: {row.item} appears twice. Keep only one of the tasks.")
        elif any(plain(ours) != plain(theirs) for ours, theirs in zip(pair, row[1:5], strict=True)):
            mistakes.append(
                f"{where}: the texts of {row.item} differ from the exported ones. Export and label it again."
            )
        else:
            ratings = enumerate(row.ratings, 1)
            votes[row.item] = [{"annotator": f"rater {n}", "label": label} for n, label in ratings if label]
    if mistakes:
        raise Mistakes(*mistakes)
    return votes
