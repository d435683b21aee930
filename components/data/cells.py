"""What one row or cell holds, where it may be more than Python or a later stage can: a bad row is one row's problem."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from components.data.rows import Problem

if TYPE_CHECKING:
    import pyarrow as pa

DEEPEST = 100
"""Lists and objects inside each other. JSON's own reader fails at about a thousand, its writer at fewer."""


LARGEST_ROW = 16 * 2**20
"""Bytes of a row of an Arrow table."""


class BadJson(ValueError):
    """JSON that can't be read. `line` is where it breaks its grammar, None where it only holds what can't be held;
    `more` says that a whole value stands there, and then something else."""

    def __init__(self, text: str, line: int | None = None, place: int = 0, more: bool = False) -> None:
        super().__init__(f"{text} at character {place}" if place else text)
        self.text, self.line, self.more = text, line, more


def parse_json(text: str) -> Any:
    """The value of a JSON text, strictly: no NaN, no key twice, no number or nesting that others can't take.

    Raises:
        BadJson: it isn't that.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.lineno, error.pos + 1, error.msg == "Extra data") from error
    except RecursionError as error:
        raise _too_deep() from error
    except BadJson:
        raise
    except ValueError as error:  # a whole number of over 4,300 digits
        raise BadJson("a number has too many digits to be read") from error
    if text.count("[") + text.count("{") > DEEPEST and _depth(value) > DEEPEST:
        raise _too_deep()
    return value


def elements(text: str) -> Iterator[str]:
    """The texts of the elements of a JSON array, found by its brackets."""
    depth = start = 0
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token in "[{":
            depth += 1
            start = found.end() if depth == 1 else start
        elif token in "]}":
            depth -= 1
        if (token == "," and depth == 1) or (token == "]" and depth == 0):
            yield text[start : found.start()]
            start = found.end()
    if depth:  # it breaks off
        yield text[start:]


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]', re.DOTALL)


def twice(names: Iterable[str]) -> str:
    """The names that stand more than once, in quotes; empty where none does."""
    return ", ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is no JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadJson(f"a key stands twice: {twice(name for name, _ in pairs)}. Keep one of each")
    return found


def _too_deep() -> BadJson:
    return BadJson(f"lists and objects are nested more than {DEEPEST} deep")


def _depth(value: Any) -> int:
    """How deep lists and objects stand inside each other, counted up to one more than `DEEPEST`."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST + 1:
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
    return depth - 1


class Unheld:
    """A cell that Python can't hold, such as a date after the year 9999. It has a type and no value."""

    def __init__(self, kind: object) -> None:
        self.kind = str(kind)

    def __repr__(self) -> str:
        return f"a {self.kind} that can't be read"


def doubled_fields(fields: Iterable[Any]) -> str:
    """The names of columns of a schema, or of fields inside one of them, that stand twice beside each other."""
    import pyarrow as pa

    fields = list(fields)
    found = [twice(field.name for field in fields)]
    for field in fields:
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            found.append(doubled_fields(kind))
    return ", ".join(filter(None, found))


def check_batch(batch: "pa.RecordBatch") -> None:
    """Check what `arrow_rows` relies on, for rows that come from Arrow's own files: Parquet is decoded, these are
    memory as it was, and an offset that leads out of it ends the process.

    Raises:
        pa.ArrowInvalid: the batch is damaged. Text that is no UTF-8 isn't that, unless it is inside of lists.
    """
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error) or _is_nested(column.type):
                raise


def arrow_rows(batch: "pa.RecordBatch") -> Iterator[tuple[Mapping[str, Any], Problem | None]]:
    """Each row of `batch` by column, with its problem where it has one.

    Text that is no UTF-8 has lone surrogates in the place of the wrong bytes, as in CSV: a row check refuses it where
    it is used. A date or number that Python has none for is an `Unheld`.
    """
    if batch.nbytes > LARGEST_ROW:
        for n in range(batch.num_rows):
            row = batch.slice(n, 1)
            if row.nbytes > LARGEST_ROW:
                yield {}, Problem("readable", f"the row is larger than {LARGEST_ROW >> 20} MiB")
            else:
                yield from _rows_of(row)
    else:
        yield from _rows_of(batch)


def _rows_of(batch: "pa.RecordBatch") -> Iterator[tuple[Mapping[str, Any], Problem | None]]:
    try:
        rows = batch.to_pylist()
    except Exception:  # whatever one cell of a thousand raises; each is then looked at by itself
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = [{name: _held(column[n]) for name, column in columns.items()} for n in range(batch.num_rows)]
    nested = any(_is_nested(field.type) for field in batch.schema)
    for row in rows:
        deep = nested and _depth(row) > DEEPEST
        yield row, Problem("readable", str(_too_deep())) if deep else None


def _is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind))


def _held(cell: Any) -> Any:
    import pyarrow as pa

    try:
        return cell.as_py()
    except Exception:  # pyarrow raises what Python's decoders, dates and time zones raise
        if isinstance(cell, pa.StructScalar):
            return {field.name: _held(cell[place]) for place, field in enumerate(cell.type)}
        if isinstance(cell, pa.MapScalar):
            return Unheld(cell.type)
        if isinstance(cell, pa.ListScalar):
            return [_held(inner) for inner in cell.values]
        if isinstance(cell, pa.DictionaryScalar):
            return _held(cell.value)
        if isinstance(cell, pa.StringScalar):
            return cell.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        return Unheld(cell.type)
