"""Read rating sheets that raters return: CSV or JSON, of all raters or of one, or an export of Label Studio.

All mistakes in a file are reported together.
"""

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.strict_json import BadJson, parse_json
from components.base.text import counted
from components.data.spreadsheet import unprotect
from components.human_eval.batch.label_studio import is_export, sheet_rows
from components.human_eval.sheet import OF_CRITERIA, PEOPLE, TEXTS, SheetRow, rating_columns, rating_of

_LARGEST = 256 * 2**20
_START = 2**18
_ABOVE = 1_000
"""Number of first rows in which the header is searched, below guidelines, a title or Excel's `sep=;`."""
_COLUMN = re.compile(r"rating_\d+")
_PEOPLE = re.compile(r"[1-9]\d{0,2}")
_Records = list[tuple[int, Mapping[str, object]]]


class ReturnedSheet(NamedTuple):
    """A file that a rater returned, as far as it could be read."""

    path: Path
    rows: list[SheetRow]
    """The rows that name an item, if all columns are there. A rating without a column is "", like a missing one."""
    lossy: bool
    """Whether characters may have been lost because a program saved the file in an older encoding."""
    mistakes: list[str]
    """The mistakes, in order, each with file, row and column."""
    raters: int = 0
    """Number of people whose ratings its rows have: the sheet's raters, or the number in its column `raters`."""


def parse_sheet(path: Path, raters: int, valid: Sequence[str], criteria: Sequence[str] = ()) -> ReturnedSheet:
    """Read a returned sheet: CSV (comma, semicolon or tab; UTF-8, UTF-16 or Windows-1252) or JSON (Lines or an array).

    The format is recognised by the content. The file has the columns of all raters, of some, or the columns `rater` and
    `rating` of one rater's own file. If more people than the sheet's raters shared the items, a column `raters` gives
    their number. Names of columns and ratings may be in capitals and padded. Lines above the header, empty rows and
    other columns are ignored.

    Args:
        valid: the allowed overall ratings.
        criteria: the further questions, in columns `helpful_1` or, in a rater's own file, `helpful`.

    Raises:
        UserError: nothing can be read, or the columns are not those of a sheet.
    """
    mistakes: list[str] = []
    records, lossy = _records(path, mistakes)
    columns = list(dict.fromkeys(name for _, record in records for name in record))
    shared = [str(record.get(PEOPLE)) for _, record in records]
    raters = max([raters, *(int(count) for count in shared if _PEOPLE.fullmatch(count))])
    wrong = list(_wrong_columns(path, columns, raters)) if records else []
    mistakes += wrong
    rows = [row for record in records if (row := _row(path, *record, raters, valid, criteria, mistakes)) is not None]
    if not rows and not mistakes:
        raise UserError(f"{path} holds no rows. Fill in the sheet that the run wrote and give that.")
    return ReturnedSheet(path, [] if wrong else rows, lossy, mistakes, raters)


def looks_like_sheet(path: Path) -> bool:
    """Return whether a CSV file is a rating sheet by its header, which may have other rows above it."""
    if path.suffix.lower() not in (".csv", ".tsv", ".txt") or not path.is_file():
        return False
    with path.open("rb") as file:
        start = file.read(_START)
    text = start.decode("utf-16" if start.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig", "replace")
    try:
        lines, at = _header(path, text)
    except UserError:
        return False
    return set(TEXTS) <= set(lines[at - 1])


def _records(path: Path, mistakes: list[str]) -> tuple[_Records, bool]:
    """Return a file's rows, and whether its encoding may have lost characters; Label Studio's as rows of a sheet."""
    text, lossy = _decode(path)
    records = _json(path, text, mistakes) if text.lstrip()[:1] in ("{", "[") else _table(path, text, mistakes)
    if records and all(is_export(path, record) for _, record in records):
        records = sheet_rows(path, records, mistakes)
    return records, lossy


def _decode(path: Path) -> tuple[str, bool]:
    """Return the text of a file, and whether its encoding may have lost characters."""
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} has more than {_LARGEST >> 20} MiB, which no sheet has. Give the filled sheet.")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the sheet {path} can't be read: {error.strerror}.") from error
    if data.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise UserError(f"{path} is a spreadsheet program's own file. Save the sheet as CSV (UTF-8) and give that.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace"), False
    try:
        return data.decode("utf-8-sig"), data.isascii()
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace"), True  # the encoding of "CSV" in older versions of Excel


def _name(cell: str) -> str:
    """Return a column's name in the form that is searched for."""
    return "_".join(cell.casefold().split())


def _lines(path: Path, text: str, delimiter: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    limit = csv.field_size_limit(_LARGEST)  # a limit of the whole process, 131,072 by default
    try:
        return list(reader)
    except csv.Error as error:
        raise UserError(f"{path}, line {reader.line_num}: not readable as CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)


def _header(path: Path, text: str) -> tuple[list[list[str]], int]:
    """Return the cells of every row, with column names in plain form, and the number of the header's row."""
    for delimiter in ",;\t":
        lines = _lines(path, text, delimiter)
        for number, cells in enumerate(lines[:_ABOVE], 1):
            names = [_name(cell) for cell in cells]
            if "item" in names and len(names) > 1:
                lines[number - 1] = names
                return lines, number
    raise UserError(f"{path}: no column `item` in its first rows. A sheet has {', '.join(TEXTS)} and ratings.")


def _table(path: Path, text: str, mistakes: list[str]) -> _Records:
    lines, at = _header(path, text)
    header = lines[at - 1]
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise UserError(f"{path}, row {at}: column `{doubled[0]}` appears twice. Keep one.")
    records: _Records = []
    for number, cells in enumerate(lines[at:], at + 1):
        if not any(cell.strip() for cell in cells):
            continue
        if any(cell.strip() for cell in cells[len(header) :]):
            mistakes.append(
                f"{path}, row {number}: {counted(len(cells), 'cell')} where row {at} has {len(header)}. A cell was "
                "split or "
                "moved: put the text back into quotes."
            )
            continue
        padded = cells + [""] * (len(header) - len(cells))
        records.append((number, {name: unprotect(cell) for name, cell in zip(header, padded, strict=False)}))
    if not records and not mistakes:
        raise UserError(f"{path} holds no rows. Fill in the sheet that the run wrote and give that.")
    return records


def _json(path: Path, text: str, mistakes: list[str]) -> _Records:
    """Return the objects of JSON Lines, or of one array."""
    try:
        whole = parse_json(text) if text.lstrip().startswith("[") else None
    except BadJson as error:
        raise UserError(f"{path}: not JSON ({error}).") from error
    values: Iterator[tuple[int, object]] = (
        enumerate(whole, 1) if isinstance(whole, list) else _parsed(path, text, mistakes)
    )
    records: _Records = []
    for number, record in values:
        if isinstance(record, dict):
            records.append((number, {_name(name): value for name, value in record.items()}))
        else:
            mistakes.append(f"{path}, row {number}: a JSON object is needed, with the columns as keys.")
    return records


def _parsed(path: Path, text: str, mistakes: list[str]) -> Iterator[tuple[int, object]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, parse_json(line)
            except BadJson as error:
                mistakes.append(f"{path}, row {number}: not JSON ({error}).")


def _wrong_columns(path: Path, columns: Sequence[str], raters: int) -> Iterator[str]:
    """Yield the mistakes in the columns of a file."""
    wanted = rating_columns(raters)
    if missing := [name for name in TEXTS if name not in columns]:
        names = ", ".join(f"`{name}`" for name in missing)
        yield (
            f"{path}: no column {names}. Without the texts Tether cannot check that each rating is still beside the "
            "replies that it rates: give the sheet with all its columns."
        )
    present = [name for name in columns if _COLUMN.fullmatch(name)]
    if extra := [name for name in present if name not in wanted]:
        yield (
            f"{path}: column `{extra[0]}` is not a rating column of this sheet ({', '.join(wanted)}). Its ratings "
            "would not count: remove it, or sample again with more human_eval.raters."
        )
    if "rating" in columns and "rater" not in columns:
        yield (
            f"{path}: no column `rater`, which says in every row whose rating it is (1 to {raters}). Put it back, or "
            "call the column `rating` by its rater: rating_1, rating_2."
        )
    if not present and "rating" not in columns:
        yield f"{path}: no rating column. Add {', '.join(wanted)}, or `rating` and `rater`."


def _row(
    path: Path,
    number: int,
    record: Mapping[str, object],
    raters: int,
    valid: Sequence[str],
    criteria: Sequence[str],
    mistakes: list[str],
) -> SheetRow | None:
    """Return a row, or None if its item or texts are invalid; add mistakes to `mistakes`."""
    before = len(mistakes)
    texts = []
    for name in TEXTS:
        value = record.get(name)
        if value is not None and not isinstance(value, str):
            mistakes.append(f"{path}, row {number}, column `{name}`: text is needed, not {str(value)[:40]!r}.")
        texts.append(value if isinstance(value, str) else "")
    texts[0] = texts[0].strip()
    if not texts[0] and len(mistakes) == before:
        mistakes.append(f"{path}, row {number}: column `item` is empty. Every row must keep its item.")
    rater = str(record.get("rater") or "").strip().removesuffix(".0")
    own_file = "rating" in record and "rater" in record
    if own_file and rater not in map(str, range(1, raters + 1)):
        mistakes.append(
            f"{path}, row {number}, column `rater`: {rater[:40]!r} is not a rater of this sheet (1 to {raters})."
        )
        own_file = False

    def answers(question: str, may: Sequence[str]) -> tuple[str, ...]:
        cells = {name: record[name] for name in rating_columns(raters, question) if name in record}
        theirs = f"{question}_{rater}"
        if own_file and record.get(question) not in (None, "") and cells.get(theirs) not in (None, ""):
            mistakes.append(f"{path}, row {number}: columns `{question}` and `{theirs}` are the same rater's.")
        elif own_file and question in record:
            cells[theirs] = record[question]
        values = []
        for name in rating_columns(raters, question):
            rating = rating_of(cells.get(name))
            if rating and rating not in may:
                column = name if name in record else question
                mistakes.append(
                    f"{path}, row {number}, column `{column}`: {str(cells[name])[:40]!r} is not a rating. "
                    f"Write {', '.join(may)}, or nothing."
                )
                rating = ""
            values.append(rating)
        return tuple(values)

    ratings, by_criterion = answers("rating", valid), tuple(answers(name, OF_CRITERIA) for name in criteria)
    if not texts[0]:
        return None
    measured = dict(record) | ({f"seconds_{rater}": record["seconds"]} if "seconds" in record else {})
    seconds = tuple(_positive(measured.get(name)) for name in rating_columns(raters, "seconds"))
    seconds = seconds if any(seconds) else ()
    return SheetRow(number, texts[0], texts[1], texts[2], texts[3], ratings, by_criterion, seconds)


def _positive(cell: object) -> float | None:
    """Return a measured time; anything but a number above 0 was not measured."""
    try:
        value = float(str(cell))
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
