"""The rows of every format are read as their folder says.

A folder of `formats/` is a format. `rows.jsonl` has rows, and `expected.json` has cases: which of these lines make a
file, with which options of `data`, what the file is read as, and what becomes of each row.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.data.config import DataConfig
from components.data.rows import Row
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.reading_report import reading_of

FORMATS = sorted(path.parent for path in (Path(__file__).parent / "formats").glob("*/expected.json"))
MOST = 1000
"""Characters of a row, where the case says nothing else."""


def lines_of(folder: Path) -> list[str]:
    return (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)


def outcome(path: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Return what a file is read as, in the words of `expected.json`."""
    data, found = DataConfig.model_validate(case.get("options", {})), dict[str, Any]()
    if "reading" in case:
        reading = reading_of(path, data)
        found["reading"] = {
            "kind": reading.kind, "format": reading.format, "ignored": reading.ignored,
            "mistaken": reading.mistaken, "note": reading.note,
        }  # fmt: skip
    try:
        source = RowSource.named(case["kind"], path, data)
        raws = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found["rows"] = [said(row, raws) for row in judged_rows(source, case.get("characters", MOST))]
        found |= {"unread": dict(source.unread)} if source.unread else {}
    except UserError as error:
        found["refused"] = str(error).replace(str(path), "FILE")
    return json.loads(json.dumps(found))


def said(row: Row, raws: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what a row says beyond the ordinary; `data` is what a bad row keeps for the file of quarantined rows."""
    ordinary = {"weight": 1.0, "source": row.source, "row": row.number}
    item = {name: value for name, value in (row.item or {}).items() if value not in (None, ordinary.get(name))}
    found = {
        "number": row.number, "others": row.raw.others, "item": item, "ballot": row.ballot,
        "first_wins": row.first_wins, "votes": row.votes, "models": row.models, "lead": row.lead,
        "problems": row.problems,
        "data": row.data and ("as it came" if row.data == raws[row.number - 1] else row.data),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None and value not in ((), [], {})}


CASES = [
    pytest.param(folder, case, id=f"{folder.name}: {case['about']} {number}")
    for folder in FORMATS
    for number, case in enumerate(json.loads((folder / "expected.json").read_text(encoding="utf-8")))
]


@pytest.mark.parametrize(("folder", "case"), CASES)
def test_the_rows_of_a_format_are_read_as_expected(tmp_path: Path, folder: Path, case: dict[str, Any]) -> None:
    lines, path = lines_of(folder), tmp_path / "rows.jsonl"
    path.write_text("".join(lines[number - 1] for number in case["lines"]), encoding="utf-8")
    found = outcome(path, case)
    assert found == {name: value for name, value in case.items() if name in ("reading", "rows", "unread", "refused")}


@pytest.mark.parametrize("folder", FORMATS, ids=lambda folder: folder.name)
def test_what_changes_the_prompt_is_refused_in_every_format(tmp_path: Path, folder: Path) -> None:
    """Tools, functions, documents and images of a first valid row, as a list and as text; empty ones change nothing."""
    lines, path = lines_of(folder), tmp_path / "rows.jsonl"
    cases = json.loads((folder / "expected.json").read_text(encoding="utf-8"))
    valid = [case for case in cases if "rows" in case and "problems" not in str(case["rows"])]
    tool = [{"type": "function", "function": {"name": "set_timer"}}]
    for case in valid[:1]:
        rows = [json.loads(lines[number - 1]) for number in case["lines"]]
        for name in ("tools", "functions", "documents", "images"):
            if any(name in row for row in rows):
                continue
            for value in (tool, json.dumps(tool), None, [], "", "[]", "null"):
                path.write_text("".join(json.dumps(row | {name: value}) + "\n" for row in rows), encoding="utf-8")
                found = outcome(path, {key: case[key] for key in ("kind", "options") if key in case})["rows"]
                checks = [check for row in found for check, text in row.get("problems", []) if f"`{name}`" in text]
                assert checks == (["turns_valid"] * len(found) if len(value or "") > 4 or value == tool else []), value
