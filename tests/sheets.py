"""Sampled and returned sheets, for tests."""

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from components.base.errors import Mistakes
from components.base.jsonl import write_json, write_rows
from components.human_eval.batch.returned_sheets import parse_sheet
from components.human_eval.blinded_sample import write_sheet
from components.human_eval.blinding import blind, sealed_key
from components.human_eval.config import HumanEvalConfig
from components.human_eval.selection import Chosen
from components.human_eval.sheet import SheetRow

Table = list[list[str]]


def read_sheet(path: Path, raters: int, valid: Sequence[str]) -> list[SheetRow]:
    """The rows of a returned sheet. Raises UserError as `parse_sheet`, and Mistakes with all mistakes in it."""
    found = parse_sheet(path, raters, valid)
    if found.mistakes:
        raise Mistakes(*found.mistakes)
    return found.rows


def write_sample(folder: Path, items: int, **options: Any) -> Path:
    """A sample artifact for two raters, in which the policy says `yes 0` and SFT `no 0`."""
    chosen = [Chosen([{"role": "user", "content": f"question {n}"}], None, "all") for n in range(items)]
    replies = ([f"{word} {n}" for n in range(items)] for word in ("no", "yes"))
    drawn, salt = blind(chosen, *replies, 0, b"secret")
    write_json(folder / "key.json", sealed_key(drawn, salt))
    rows = ({"item": i.item, "prompt": i.chosen.prompt, "stratum": "all"} for i in drawn)
    write_rows(folder / "responses.jsonl", rows)
    write_sheet(folder, drawn, HumanEvalConfig(raters=2, repeats=0, **options))
    return folder


def cells(path: Path, delimiter: str = ",") -> Table:
    """The cells of a CSV."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.reader(file, delimiter=delimiter))


def save(path: Path, table: Table, encoding: str = "utf-8-sig", **options: Any) -> Path:
    """Write cells as a spreadsheet program does."""
    text = io.StringIO(newline="")
    csv.writer(text, **options).writerows(table)
    path.write_bytes(text.getvalue().encode(encoding, "replace"))
    return path


def fill(empty: Path, rate: Callable[[int, str], str | Sequence[str]], filled: Path | None = None) -> Path:
    """Write what `rate(row, item)` answers, in one for all or each of the rating columns, into a sheet or rater's file.

    Returns where that is: `filled`, else the file itself.
    """
    text, filled = empty.read_text(encoding="utf-8-sig"), filled or empty
    (start,) = (match.start() for match in re.finditer('^"?item"?,', text, re.MULTILINE))
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    columns = [name for name in rows[0] if name.startswith("rating")]
    for number, row in enumerate(rows):
        answer = rate(number, row["item"].partition("-")[0])  # the rest binds a row to its sample
        row.update(zip(columns, [answer] * len(columns) if isinstance(answer, str) else answer, strict=True))
    with filled.open("w", encoding="utf-8", newline="") as file:
        file.write(text[:start])
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return filled
