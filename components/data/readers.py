"""Sources of rows: JSON Lines and arrays, CSV, Parquet (the first two also gzipped), folders saved by `datasets`.

Rows are read one by one and numbered from 1 as their reader shows them: JSON Lines by line (blank lines count), CSV as
a spreadsheet does (the header is row 1), everything else by row. A row that can't be read comes out with its problem;
a source that can't be read raises `UserError`.
"""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from components.base.errors import UserError
from components.data.rows import Problem, RawRow
from components.data.spreadsheet import JSON_STARTS, LABELLED, unprotect

KINDS = ".jsonl, .json, .csv, .tsv (each also .gz), .parquet"
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_SHOWN = 500
_LARGEST_CELL = 16 * 2**20


def read_source(path: Path, split: str = "train") -> Iterator[RawRow]:
    """The rows of a file, or of a folder written by `datasets`' `save_to_disk` (then its `split`).

    Raises:
        UserError: no such file, an empty or damaged one, or a kind that isn't read.
    """
    if not path.exists():
        raise UserError(f"There is no file {path}. Give the path of a data file ({KINDS}) or a hub name (owner/name).")
    if not path.is_dir() and path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes). Give a file with rows in it.")
    row = None
    try:
        for row in _rows(path, split):
            yield row
    except (EOFError, zlib.error, OSError) as error:
        where = "can't be read from its first row on" if row is None else f"breaks off after row {row.number}"
        raise UserError(
            f"{path} {where}: {str(error).rstrip('.')}. The file is cut short or damaged; fetch or write it again."
        ) from error
    if row is None:
        raise UserError(f"{path} holds no row. Give a file with rows in it.")


def _rows(path: Path, split: str) -> Iterator[RawRow]:
    if path.is_dir():
        from components.data.hub import read_saved

        return read_saved(path, split)
    return _READERS[_kind(path)](path)


def _kind(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    with _open(path) as file:
        start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((b"{", b"[")):
        return "jsonl" if start.startswith(b"{") else "json"
    raise UserError(f"{path} is of no kind that Tether reads. Name it by its kind: {KINDS}.")


def is_gzipped(path: Path) -> bool:
    """Whether the file is gzipped, by its name or by its first bytes."""
    with path.open("rb") as file:
        return path.suffix.lower() == ".gz" or file.read(2) == b"\x1f\x8b"


def _open(path: Path) -> IO[bytes]:
    """The file's bytes, unpacked where it is gzipped."""
    if is_gzipped(path):
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    readable, first = 0, None
    with _open(path) as lines:
        for number, line in enumerate(lines, 1):
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if line.strip():
                row = _parse(number, line)
                readable += row.problem is None
                first = first or row
                yield row
    if first is not None and first.problem and not readable:
        raise UserError(
            f"Not one line of {path} is a JSON object; line {first.number}: {first.problem.text}. "
            "JSON Lines holds one object a line; name a file of another kind by its kind (" + KINDS + ")."
        )


def _parse(number: int, line: bytes) -> RawRow:
    try:
        return _as_row(number, json.loads(line.decode("utf-8"), parse_constant=_no_constant))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start + 1}"
    except json.JSONDecodeError as error:
        reason = f"bad JSON: {error.msg} at character {error.pos + 1}"
    except (ValueError, RecursionError) as error:
        reason = f"bad JSON: {error}"
    raw = line[:_SHOWN].decode("utf-8", "backslashreplace").rstrip()
    return RawRow(number, {"raw": raw}, Problem("readable", reason))


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _as_row(number: int, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(number, value)
    raw = json.dumps(value)[:_SHOWN]
    return RawRow(number, {"raw": raw}, Problem("readable", f"the row is {raw[:40]!r}, expected an object"))


def _read_json(path: Path) -> Iterator[RawRow]:
    try:
        with _open(path) as file:
            value = json.loads(file.read().decode("utf-8-sig"), parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            yield from _read_jsonl(path)
            return
        raise UserError(f"{path} is not JSON: {error.msg} at line {error.lineno}. Correct that line.") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}.") from error
    rows = value if isinstance(value, list) else [value]
    yield from (_as_row(number, row) for number, row in enumerate(rows, 1))


def _read_csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(_LARGEST_CELL)
    number = 0
    try:
        # Bytes that are no UTF-8 become lone surrogates, which a row check refuses by row.
        with io.TextIOWrapper(_open(path), "utf-8-sig", errors="surrogateescape", newline="") as text:
            first = text.readline()
            reader = csv.reader(chain([first], text), delimiter=_delimiter(path, first))
            header = next(reader, [])
            if len(set(header)) < len(header):
                raise UserError(f"The header of {path} names a column twice: {', '.join(header)}. Rename one.")
            for number, cells in enumerate(reader, 2):
                if cells:
                    yield _csv_row(number, header, cells)
    except csv.Error as error:
        raise UserError(f"{path} is no CSV at row {max(number, 1) + 1} (the header is row 1): {error}.") from error


def _delimiter(path: Path, header: str) -> str:
    """Tab in a .tsv; else what stands in the header, as spreadsheets write semicolons where the comma is decimal."""
    if any(s.lower() == ".tsv" for s in path.suffixes):
        return "\t"
    return next((delimiter for delimiter in ",;\t" if delimiter in header), ",")


def _csv_row(number: int, header: list[str], cells: list[str]) -> RawRow:
    if len(cells) != len(header):
        reason = f"{len(cells)} cells, the header has {len(header)}"
        return RawRow(number, {"raw": ",".join(cells)[:_SHOWN]}, Problem("readable", reason))
    texts = dict(zip(header, cells, strict=True))
    protected = texts.get("id", "").startswith(LABELLED)
    return RawRow(number, {name: _cell(cell, protected) for name, cell in texts.items()})


def _cell(cell: str, protected: bool) -> Any:
    """A cell's text; None if it is empty; messages or votes, which CSV holds as JSON, as themselves.

    Where the row is `protected`, what follows an apostrophe is text as it is.
    """
    if protected and cell.startswith("'"):
        return unprotect(cell)
    if cell.startswith(JSON_STARTS):
        try:
            return json.loads(cell)
        except ValueError:
            return cell
    return cell or None


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1000):
                for number, data in enumerate(batch.to_pylist(), number + 1):  # noqa: B020 (counts on over batches)
                    yield RawRow(number, data)
    except (pa.ArrowException, OSError) as error:
        raise OSError(str(error).splitlines()[0]) from error


_READERS = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "parquet": _read_parquet}
