"""Sampled and returned sheets, for tests."""

import csv
import io
from collections.abc import Sequence
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
