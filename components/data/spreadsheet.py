"""Write CSV that spreadsheets open as text and save unchanged.

An apostrophe is put before text that a spreadsheet would run as a formula, or that Tether's reader would take for JSON,
not only at the start of a cell: in a different locale a program splits cells at semicolons or tabs, takes our quotes
for text, and so begins a row at each line break in a text. The ids of rows to label (`LABELLED`) show that they are
protected in this way; in other files an apostrophe is just an apostrophe.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from components.base.errors import naming

LABELLED = "tether-"
"""Prefix of the ids of rows to label."""

JSON_STARTS = ("[{", '["', '{"')
"""Cells that start with one of these are messages or votes, if they parse as JSON."""

_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
"""Characters that start a formula; the last four are the full-width forms of = + - @."""
_BREAKS = "\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029;|"
"""Characters at which a program may begin a new cell or row inside a cell."""
_FORMULA = rf"""[^\S{_BREAKS}"]*(?:"[^\S{_BREAKS}]*)*[{_SIGNS}]"""
"""A formula, after the white space and quotes that programs drop before one."""
_JSON = "|".join(map(re.escape, JSON_STARTS))
_STARTS = rf"""(?:\A(?='|[\t\r\n]|{_JSON}|{_FORMULA})|(?<=[{_BREAKS}])(?='*{_FORMULA}))"""
_UNGUARDED = re.compile(_STARTS)
_GUARDED = re.compile(rf"\A'|(?<=[{_BREAKS}])'(?='*{_FORMULA})")
_ESCAPED = re.compile(rf"(?<=[{_BREAKS}])({_FORMULA})")


def protect(text: str) -> str:
    """Insert an apostrophe wherever a formula or JSON would start, and before an apostrophe in such a place, so that
    `unprotect` restores every text."""
    return _UNGUARDED.sub("'", text)


def unprotect(text: str) -> str:
    """Undo `protect`."""
    return _GUARDED.sub("", text)


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], above: Sequence[str] = ()
) -> None:
    """Write a CSV that Excel, LibreOffice and Sheets open as text.

    It is UTF-8 with a byte-order mark, with every cell quoted and texts protected by `protect`. Other values are
    written as JSON, with escapes for signs that would start a formula. `above` are texts above the header, one row
    each.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), path.open("w", encoding="utf-8-sig", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL, lineterminator="\r\n")
        writer.writerows([protect(text)] for text in above)
        writer.writerow(columns)
        writer.writerows([_cell(row[name]) for name in columns] for row in rows)


def _cell(value: object) -> str:
    if isinstance(value, str):
        return protect(value)
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda match: f"{match[0][:-1]}\\u{ord(match[0][-1]):04x}", text)
