"""CSV that spreadsheets open as text and give back as it was.

A cell that a spreadsheet would run as a formula, or that Tether's reader would take for JSON, has an apostrophe before
it. Rows to label say by their id (`LABELLED`) that theirs do; in anybody else's an apostrophe is an apostrophe.
"""

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LABELLED = "tether-"
"""What the ids of rows to label start with."""

JSON_STARTS = ("[{", '["', '{"')
"""Cells that start so hold messages or votes, if they parse as JSON."""

_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""What spreadsheets take for the start of a formula; the last four are the full-width forms of = + - @."""


def protect(text: str) -> str:
    """`text` with an apostrophe before it where it would be taken for a formula or JSON (or where it starts with an
    apostrophe, so that `unprotect` gives back every text)."""
    return f"'{text}" if text.startswith((*_FORMULA, *JSON_STARTS, "'")) else text


def unprotect(text: str) -> str:
    """The inverse of `protect`."""
    return text[1:] if text.startswith("'") else text


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]]) -> None:
    """Write a CSV that Excel, LibreOffice and Sheets open as text: UTF-8 with a byte-order mark, every cell quoted,
    texts disarmed by `protect`; what is no text is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
        writer.writerow(columns)
        writer.writerows([_cell(row[name]) for name in columns] for row in rows)


def _cell(value: object) -> str:
    return protect(value) if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
