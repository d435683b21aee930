"""CSV that spreadsheets open as text and give back as it was.

An apostrophe stands before what a spreadsheet would run as a formula, or Tether's reader would take for JSON. That is
not the start of a cell alone: a program of another locale splits cells at semicolons or tabs, then takes our quotes for
text, and so begins a row at each line break in a text. Rows to label say by their id (`LABELLED`) that they are
guarded so; in anybody else's an apostrophe is an apostrophe.
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from components.base.errors import naming

LABELLED = "tether-"
"""What the ids of rows to label start with."""

JSON_STARTS = ("[{", '["', '{"')
"""Cells that start so hold messages or votes, if they parse as JSON."""

_SIGNS = "=+\\-@\uff1d\uff0b\uff0d\uff20"
"""What starts a formula; the last four are the full-width forms of = + - @."""
_BREAKS = "\t\n\r\v\f\x1c-\x1e\x85\u2028\u2029;|"
"""Where a program may begin a new cell or row inside of ours."""
_FORMULA = rf"""[^\S{_BREAKS}"]*(?:"[^\S{_BREAKS}]*)*[{_SIGNS}]"""
"""A formula, after the white space and quotes that programs drop before one."""
_JSON = "|".join(map(re.escape, JSON_STARTS))
_STARTS = rf"""(?:\A(?='|[\t\r\n]|{_JSON}|{_FORMULA})|(?<=[{_BREAKS}])(?='*{_FORMULA}))"""
_UNGUARDED = re.compile(_STARTS)
_GUARDED = re.compile(rf"\A'|(?<=[{_BREAKS}])'(?='*{_FORMULA})")
_ESCAPED = re.compile(rf"(?<=[{_BREAKS}])({_FORMULA})")


def protect(text: str) -> str:
    """`text` with an apostrophe at each place where a formula or JSON would start, and where an apostrophe stands
    there already, so that `unprotect` gives back every text."""
    return _UNGUARDED.sub("'", text)


def unprotect(text: str) -> str:
    """The inverse of `protect`."""
    return _GUARDED.sub("", text)


def write_csv(
    path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, object]], above: Sequence[str] = ()
) -> None:
    """Write a CSV that Excel, LibreOffice and Sheets open as text: UTF-8 with a byte-order mark, every cell quoted,
    texts disarmed by `protect`; what is no text is written as JSON, its formula signs as escapes where needed.

    `above` are texts that stand above the header, a row each.
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
    return _ESCAPED.sub(lambda found: f"{found[0][:-1]}\\u{ord(found[0][-1]):04x}", text)
