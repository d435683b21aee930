"""The rating sheet as CSV and JSON Lines: written for spreadsheets and people, read back as they return it."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypedDict

from components.base.errors import UserError
from components.base.strict_json import BadJson, parse_json
from components.data.spreadsheet import unprotect

SIMULATED = "ratings.simulated.csv"
"""The sheet as the simulated judges filled it in, in a sample artifact."""
_LARGEST = 256 * 2**20
TEXTS = ("item", "prompt", "response_a", "response_b")


class SheetRow(NamedTuple):
    """One line of a sheet. `number` is its row in the file (a CSV's header is row 1); "" is a rating not given."""

    number: int
    item: str
    prompt: str
    response_a: str
    response_b: str
    ratings: tuple[str, ...]


class SheetInfo(TypedDict):
    """`sheet.json`: what raters are told of a sheet, and what it takes to read it back."""

    instructions: str
    columns: list[str]
    ratings: list[str]
    raters: int
    items: int
    key_sha256: str
    for_raters: list[str]
    text_cells: str


def rating_columns(raters: int) -> list[str]:
    """`rating_1` to `rating_k`, a rater each."""
    return [f"rating_{i}" for i in range(1, raters + 1)]


def as_record(row: SheetRow) -> dict[str, str]:
    """A sheet's row by column."""
    return dict(zip([*TEXTS, *rating_columns(len(row.ratings))], [*row[1:5], *row.ratings], strict=True))


def read_sheet(path: Path, raters: int, valid: Sequence[str]) -> list[SheetRow]:
    """The rows of a sheet, CSV (comma, semicolon or tab; UTF-8, UTF-16 or Windows-1252) or JSON Lines, told apart by
    content. Ratings may be in capitals and padded; rows without any content and further columns are passed over.

    Raises:
        UserError: naming file, row and column: unreadable, a missing or doubled column, a rating that isn't `valid`.
    """
    text = _decode(path)
    wanted = rating_columns(raters)
    records = _json_lines(path, text) if text.lstrip().startswith("{") else _table(path, text, wanted)
    rows = []
    for number, record in records:
        _check_columns(path, number, list(record), wanted)
        ratings = tuple(_rating(path, number, name, record[name], valid) for name in wanted)
        item, prompt, response_a, response_b = (_text(path, number, name, record.get(name)) for name in TEXTS)
        if not item:
            raise UserError(f"{path}, row {number}: column `item` is empty. Every row keeps the item it was given.")
        rows.append(SheetRow(number, item, prompt, response_a, response_b, ratings))
    if not rows:
        raise UserError(f"{path} holds no rows. Fill in the sheet that the run wrote and give that.")
    return rows


def _decode(path: Path) -> str:
    try:
        if path.stat().st_size > _LARGEST:
            raise UserError(f"{path} has more than {_LARGEST >> 20} MiB, which no sheet has. Give the filled sheet.")
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"the sheet {path} can't be read: {error.strerror}.") from error
    if data.startswith((b"PK\x03\x04", b"\xd0\xcf\x11\xe0")):
        raise UserError(f"{path} is a spreadsheet program's own file. Save the sheet as CSV (UTF-8) and give that.")
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # What older Excels save as "CSV"; scoring needs only the items and ratings, which are ASCII.
        return data.decode("cp1252", "replace")


def _table(path: Path, text: str, wanted: Sequence[str]) -> Iterable[tuple[int, Mapping[str, object]]]:
    for delimiter in ",;\t":
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        try:
            lines = list(reader)
        except csv.Error as error:
            raise UserError(f"{path}, line {reader.line_num}: not readable as CSV: {error}.") from error
        header = [name.strip() for name in lines[0]] if lines else []
        if "item" in header:
            break
    else:
        raise UserError(f"{path}: no column `item` in the first row. A sheet has {', '.join([*TEXTS, *wanted])}.")
    doubled = sorted({name for name in header if name and header.count(name) > 1})
    if doubled:
        raise UserError(f"{path}: column `{doubled[0]}` is there twice. Keep one of each.")
    _check_columns(path, 1, header, wanted)
    for number, cells in enumerate(lines[1:], 2):
        if any(cell.strip() for cell in cells):
            if any(cell.strip() for cell in cells[len(header) :]):
                raise UserError(
                    f"{path}, row {number}: {len(cells)} cells where the first row has {len(header)}. A cell was split "
                    "or moved: put the text back into quotes."
                )
            padded = cells + [""] * (len(header) - len(cells))
            yield number, {name: unprotect(cell) for name, cell in zip(header, padded, strict=False)}


def _json_lines(path: Path, text: str) -> Iterable[tuple[int, Mapping[str, object]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line)
        except BadJson as error:
            raise UserError(f"{path}, row {number}: not JSON ({error}).") from error
        if not isinstance(record, dict):
            raise UserError(f"{path}, row {number}: a JSON object is needed, with the columns as keys.")
        yield number, record


def _check_columns(path: Path, number: int, names: Sequence[str], wanted: Sequence[str]) -> None:
    if {"sft", "policy"} <= set(names):
        raise UserError(
            f"{path}, row {number}: column `policy` is that of the unblinded result, which names the models. "
            "Give the sheet that the raters filled in."
        )
    for name in ("item", *wanted):
        if name not in names:
            columns = ", ".join(("item", *wanted))
            raise UserError(f"{path}, row {number}: column `{name}` is missing. Needed are {columns}.")
    extra = [name for name in names if name.startswith("rating_") and name not in wanted]
    if extra:
        raise UserError(
            f"{path}, row {number}: column `{extra[0]}` is none of this sheet's rating columns ({', '.join(wanted)}). "
            f"Its ratings would not count: remove it, or sample again with more human_eval.raters."
        )


def _text(path: Path, number: int, name: str, value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise UserError(f"{path}, row {number}, column `{name}`: text is needed, not {str(value)[:40]!r}.")
    return value.strip() if name == "item" else value


def _rating(path: Path, number: int, name: str, value: object, valid: Sequence[str]) -> str:
    rating = "" if value is None else str(value).strip().casefold()
    if rating and rating not in valid:
        raise UserError(
            f"{path}, row {number}, column `{name}`: {str(value)[:40]!r} is no rating. "
            f"Valid are {', '.join(valid)}, or nothing."
        )
    return rating
