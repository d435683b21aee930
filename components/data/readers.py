"""Sources of rows: JSON Lines and arrays, CSV, Parquet (the first two also gzipped), folders saved by `datasets`.

Rows are read one by one and numbered from 1: JSON Lines by line (blank lines count), CSV like a spreadsheet (the header
is row 1), all others by row. Blank lines, and rows of CSV whose cells are all blank, are skipped. A row that cannot be
read is returned with its problem; a source that cannot be read raises `UserError`.
"""

import contextlib
import csv
import gzip
import io
import json
import re
import shlex
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, AnyStr, NoReturn, cast

from components.base.errors import UserError
from components.base.strict_json import BadJson, elements, parse_json, twice
from components.base.text import counted
from components.data.config import ReaderPlugin
from components.data.rows import Problem, RawRow, shown
from components.data.spreadsheet import JSON_STARTS, LABELLED, unprotect
from components.data.tables.cells import arrow_rows, doubled_fields
from components.keys.plugins import find_plugin

KINDS = ".jsonl, .json, .csv, .tsv (each also .gz), .parquet"
_SUFFIXES = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "csv",
    ".parquet": "parquet", ".pq": "parquet",
}  # fmt: skip
_PACKED = {
    b"\x28\xb5\x2f\xfd": "Unpack it with `zstd -dc < {name} > FILE` and give FILE.",
    b"BZh": "Unpack it with `bunzip2 -c < {name} > FILE` and give FILE.",
    b"\xfd7zXZ\0": "Unpack it with `unxz -c < {name} > FILE` and give FILE.",
    b"PK\3\4": "Unpack it with `unzip {name}` and give a file of it, or save a workbook's sheet as CSV.",
    b"ARROW1": "Write it as Parquet: `pyarrow.parquet.write_table`.",
}
"""Maps the first bytes of a file in another format to what to do with it."""
_PYTHON_LIST = re.compile(r"\[\{'(?:role|content|from|value)': ")
"""How messages start that pandas wrote into a cell."""
_SEPARATOR = re.compile(r'"?sep=(.)"?[;,\t]*\r?\n', re.IGNORECASE)
"""The first line by which Excel is told the delimiter; it shows no row for it."""
_UNQUOTED = (
    "a quotation mark is not closed, or text follows one that closes a cell: write a quotation mark inside a quoted "
    "cell twice"
)
_SHOWN = 500
_MIB = 2**20
_LARGEST_CELL = 16 * _MIB
_LARGEST_LINE = 32 * _MIB
_LARGEST_JSON = 1024 * _MIB
_UNPACKED, _RATIO = 64 * _MIB, 100
"""A gzipped file may unpack to at most this many bytes, or this many times its own size, whichever is larger. (Text
compresses by about a tenth of that factor.)"""


def read_source(
    path: Path,
    split: str = "train",
    readers: Mapping[str, ReaderPlugin] = MappingProxyType({}),
) -> Iterator[RawRow]:
    """Yield the rows of a file, or of the `split` of a folder written by `save_to_disk` of `datasets`.

    Args:
        readers: maps a file's suffix to the plug-in that reads it.

    Raises:
        UserError: the file does not exist, is empty, damaged or of an unknown kind, or a plug-in cannot read it.
    """
    if not path.exists():
        raise UserError(f"{path}: there is no such file. Give the path of a data file ({KINDS}).")
    if path.is_dir():
        from components.data.hub import read_saved

        rows: Iterable[RawRow] = read_saved(path, split)
    elif path.stat().st_size == 0:
        raise UserError(f"{path} is empty (0 bytes). Give a file with rows in it.")
    elif path.suffix.lower() in readers:
        rows = _plugged(path, readers[path.suffix.lower()])
    else:
        _refuse_packed(path)
        if (kind := _kind(path)) != "parquet":
            _refuse_utf16(path)
        rows = _READERS[kind](path)
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        raise UserError(f"{path} holds no row. Give a file with rows in it.")


def _plugged(path: Path, reader: ReaderPlugin) -> Iterator[RawRow]:
    field = f"data.readers.{path.suffix.lower()}"
    plugin = find_plugin("tether.readers", reader.plugin, field, reader.code)
    read, number = plugin.load(field), 0
    try:
        for number, row in enumerate(read(path), 1):
            yield _as_row(number, row)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{path}: the plug-in {plugin.name} ({plugin.label}) raises {type(error).__name__}: {error}, after row "
            f"{number}. Correct the file or the plug-in."
        ) from error


def _kind(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes if s.lower() != ".gz"]
    if suffixes and suffixes[-1] in _SUFFIXES:
        return _SUFFIXES[suffixes[-1]]
    try:
        with _open(path) as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
    except (EOFError, zlib.error, OSError) as error:
        _broken(path, 0, error)
    if start.startswith(b"PAR1"):
        return "parquet"
    if start.startswith((b"{", b"[")):
        return "jsonl" if start.startswith(b"{") else "json"
    raise UserError(
        f"{path} is not in a format that Tether reads. Unpack it if it is an archive; else give its name the suffix of "
        f"its format ({KINDS}), or name a plug-in that reads it in data.readers."
    )


def _refuse_packed(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if advice := next((advice for magic, advice in _PACKED.items() if start.startswith(magic)), ""):
        advice = advice.format(name=shlex.quote(str(path)))
        raise UserError(f"{path} is not in a format that Tether reads ({KINDS}). {advice}")


def _refuse_utf16(path: Path) -> None:
    """Refuse a text file in UTF-16 or UTF-32, which spreadsheets write as `Unicode text`."""
    with contextlib.suppress(EOFError, zlib.error, OSError), _open(path) as file:  # reading the rows names the damage
        start = file.read(4)
        if start[:2] in (b"\xff\xfe", b"\xfe\xff") or (len(start) == 4 and start.count(0) in (2, 3)):
            raise UserError(f"{path} is in UTF-16 or UTF-32, and Tether reads UTF-8. Save it again in UTF-8.")


def is_gzipped(path: Path) -> bool:
    """Return whether the file is gzipped, by its name or by its first bytes."""
    with path.open("rb") as file:
        return path.suffix.lower() == ".gz" or file.read(2) == b"\x1f\x8b"


def _open(path: Path) -> IO[bytes]:
    raw = _Unpacked(path) if is_gzipped(path) else io.FileIO(path)
    return cast(IO[bytes], io.BufferedReader(raw, _MIB))


def _most_unpacked(path: Path) -> int:
    return max(_UNPACKED, _RATIO * path.stat().st_size)


def _bomb(path: Path) -> UserError:
    return UserError(
        f"{path} unpacks to more than {_most_unpacked(path) // _MIB} MiB, over {_RATIO} times its own size, and is not "
        "read any further, because a small file can fill memory and disk that way. If it is your data, write it as "
        "plain JSON Lines and give that."
    )


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a gzipped file.

    Raises:
        UserError: by a read, if the unpacked size is too large for the file.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.read_so_far, self.most = path, 0, _most_unpacked(path)
        self._file = gzip.GzipFile(path)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read1(len(buffer))  # returns the bytes before a damaged one first
        self.read_so_far += len(data)
        if self.read_so_far > self.most:
            raise _bomb(self.path)
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of a file; refuse an endless line before it fills memory."""
    number = 0
    while line := file.readline(_LARGEST_LINE):
        number += 1
        if len(line) == _LARGEST_LINE:
            raise UserError(
                f"{path}, line {number}: it is longer than {_LARGEST_LINE // _MIB} MiB, the limit for a row. "
                "Check that the file is JSON Lines, with each row on a line of its own."
            )
        yield line


def _broken(path: Path, row: int, error: Exception) -> NoReturn:
    where = f"breaks off after row {row}" if row else "can't be read at all"
    raise UserError(
        f"{path} {where}: {str(error).rstrip('.')}. The file is cut short or damaged; fetch or write it again."
    ) from error


def _read_jsonl(path: Path) -> Iterator[RawRow]:
    number, readable, first = 0, 0, None
    try:
        with _open(path) as file:
            for number, line in enumerate(_lines(path, file), 1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if line.strip():
                    row = _parse(number, line)
                    readable += row.problem is None
                    first = first or row
                    yield row
    except (EOFError, zlib.error, OSError) as error:
        _broken(path, number, error)
    if first is not None and first.problem and not readable:
        raise UserError(
            f"No line of {path} is a JSON object; line {first.number}: {first.problem.text}. "
            "JSON Lines has one object on each line. Correct its lines; if the file has another format, give its name "
            f"that suffix ({KINDS})."
        )


def _parse(number: int, line: bytes) -> RawRow:
    try:
        return _as_row(number, parse_json(line.decode("utf-8")))
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 at byte {error.start + 1}"
    except BadJson as error:
        reason = f"bad JSON: {error}"
    return RawRow(
        number, {"raw": line[:_SHOWN].decode("utf-8", "backslashreplace").rstrip()}, Problem("readable", reason)
    )


def _as_row(number: int, value: Any) -> RawRow:
    if isinstance(value, dict):
        return RawRow(number, value)
    raw = json.dumps(value)[:_SHOWN]
    return RawRow(number, {"raw": raw}, Problem("readable", f"the row is {raw[:40]!r}, expected an object"))


def _read_json(path: Path) -> Iterator[RawRow]:
    if path.stat().st_size > _LARGEST_JSON:
        raise UserError(
            f"{path} has more than {_LARGEST_JSON // _MIB} MiB, and a JSON array is read whole. Write it as JSON Lines "
            "(.jsonl), one object a line, which is read row by row."
        )
    try:
        with _open(path) as file:
            text = file.read().decode("utf-8-sig")
    except (EOFError, zlib.error, OSError) as error:
        _broken(path, 0, error)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not JSON: not UTF-8 at byte {error.start + 1}. Write it in UTF-8.") from error
    try:
        value = parse_json(text)
    except BadJson as error:
        is_array = text.lstrip().startswith("[")
        if error.more or (error.line is None and not is_array):
            yield from _read_jsonl(path)
            return
        if error.line is not None:
            raise UserError(f"{path} is not JSON: {error.text} at line {error.line}. Correct that line.") from error
        # A value cannot be represented: only its row is bad.
        yield from (_parse(number, row.encode()) for number, row in enumerate(elements(text), 1))
        return
    rows = value if isinstance(value, list) else [value]
    yield from (_as_row(number, row) for number, row in enumerate(rows, 1))


def _read_csv(path: Path) -> Iterator[RawRow]:
    csv.field_size_limit(_LARGEST_CELL)
    number = 0
    try:
        # Invalid UTF-8 becomes lone surrogates, which a row check refuses row by row.
        with io.TextIOWrapper(_open(path), "utf-8-sig", errors="surrogateescape", newline="") as text:
            lines = _lines(path, text)
            first = next(lines, "")
            named = _SEPARATOR.fullmatch(first)
            first = next(lines, "") if named else first
            delimiter = named[1] if named else _delimiter(path, first)
            some = list(islice(lines, 20))
            mark = re.escape(delimiter)
            blanks = _has_blanks(first, mark) or _has_blanks("".join(some), f'{mark}(?= *"")')
            records = _records(chain([first, *some], lines), delimiter, blanks)
            header = next(records, [])
            if isinstance(header, str):
                raise csv.Error(_UNQUOTED)
            header = [name.strip() for name in header]
            number = 1
            if doubled := twice(filter(str.strip, header)):
                raise UserError(f"The header of {path} names a column twice: {doubled}. Rename one.")
            for number, cells in enumerate(records, 2):
                if isinstance(cells, str):
                    yield RawRow(number, {"raw": cells[:_SHOWN].rstrip()}, Problem("readable", _UNQUOTED))
                elif any(map(str.strip, cells)):
                    yield _csv_row(number, header, cells)
    except csv.Error as error:
        at = f"row {number + 1} (the header is row 1)"
        raise UserError(f"{path} is not valid CSV at {at}: {error}.") from error
    except (EOFError, zlib.error, OSError) as error:
        _broken(path, number, error)


def _has_blanks(line: str, delimiter: str) -> bool:
    """Return whether blanks follow each match of the pattern `delimiter` in a line, outside of its quotes."""
    blanks = re.findall(f"{delimiter}( *)", re.sub(r'"[^"]*"', '""', line))
    return bool(blanks) and all(blanks)


def _records(lines: Iterator[str], delimiter: str, blanks: bool) -> Iterator[list[str] | str]:
    """Yield the cells of each record. Where the quotation marks of one are wrong, yield its first line as text and
    continue with the next line: an open quotation mark would take all lines up to the next one into its cell. `blanks`
    after a delimiter are no part of a cell."""
    taken: list[str] = []
    again: deque[str] = deque()

    def given() -> Iterator[str]:
        while line := again.popleft() if again else next(lines, ""):
            taken.append(line)
            yield line

    while True:
        try:
            for cells in csv.reader(given(), delimiter=delimiter, skipinitialspace=blanks, strict=True):
                taken.clear()
                yield cells
            return
        except csv.Error as error:
            if "limit" in str(error):
                raise
            first, *rest = taken
            taken.clear()
            again.extendleft(reversed(rest))
            yield first


def _delimiter(path: Path, header: str) -> str:
    """Return the delimiter: a tab in a .tsv, else by the header outside of its quotes; spreadsheets use semicolons in
    some locales."""
    if any(s.lower() == ".tsv" for s in path.suffixes):
        return "\t"
    bare = re.sub(r'"[^"]*"', "", header)
    return next((delimiter for delimiter in ",;\t|" if delimiter in bare), ",")


def _csv_row(number: int, header: list[str], cells: list[str]) -> RawRow:
    """Return a row without its empty cells in columns that have no name, as spreadsheets add them. Only the first
    column may hold text without a name: pandas writes an index there."""
    texts = {name: cell for name, cell in zip(header, cells, strict=False) if name.strip() or cell.strip()}
    protected = texts.get("id", "").startswith(LABELLED)
    try:
        if len(cells) != len(header):
            raise BadJson(f"{counted(len(cells), 'cell')}, the header has {len(header)}")
        for place, (name, cell) in enumerate(zip(header, cells, strict=True), 1):
            if place > 1 and cell.strip() and not name.strip():
                raise BadJson(
                    f"column {place} has no name in the header and holds {shown(cell)}: name it, or quote the text "
                    "that was split into it"
                )
        return RawRow(number, {name: _cell(name, cell, protected) for name, cell in texts.items()})
    except BadJson as error:
        return RawRow(number, {"raw": ",".join(cells)[:_SHOWN]}, Problem("readable", str(error)))


def _cell(name: str, cell: str, protected: bool) -> Any:
    """Return a cell's text; None if it is empty; messages or votes, which are JSON in CSV, as values.

    In a `protected` row the text after an apostrophe is kept unchanged.

    Raises:
        BadJson: it is JSON that is refused.
    """
    if _PYTHON_LIST.match(cell):
        raise BadJson(
            f"column `{name}` is a list as Python prints it, not JSON. Write the file as JSON Lines or Parquet"
        )
    if cell.startswith(JSON_STARTS):
        try:
            return parse_json(cell)
        except BadJson as error:
            if error.line is not None:
                return cell
            raise BadJson(f"column `{name}`: {error}") from error
    return (unprotect(cell) if protected else cell) or None


def _read_parquet(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            if doubled := doubled_fields(file.schema_arrow):
                raise UserError(f"{path} has a column twice: {doubled}. Rename one.")
            size = sum(file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups))
            if size > _most_unpacked(path):
                raise _bomb(path)
            at_once = _LARGEST_LINE * file.metadata.num_rows // max(size, 1)
            # Few at a time in any case: a text that all rows share is stored once, but read for each row.
            for batch in file.iter_batches(batch_size=min(max(at_once, 1), 16)):
                for data, problem in arrow_rows(batch):
                    number += 1
                    yield RawRow(number, data, problem)
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        _broken(path, number, ValueError((str(error).splitlines() or [type(error).__name__])[0]))


_READERS = {"jsonl": _read_jsonl, "json": _read_json, "csv": _read_csv, "parquet": _read_parquet}
