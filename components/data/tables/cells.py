"""Read rows of Arrow tables so that a cell that Python cannot represent is a problem of its row only."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from components.base.strict_json import DEEPEST, TOO_DEEP, depth_of, twice
from components.data.rows import Problem

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_ROW = 16 * 2**20
"""Most bytes in a row of an Arrow table."""
_UNHELD = (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError)
"""Errors that pyarrow raises for a cell: its own, and those of Python's decoders, dates and time zones."""


class Unheld:
    """A cell that Python cannot represent, such as a date after the year 9999. It has a type but no value."""

    def __init__(self, kind: object) -> None:
        self.kind = str(kind)

    def __repr__(self) -> str:
        return f"a {self.kind} that can't be read"


def doubled_fields(fields: Iterable[Any]) -> str:
    """Return the names of columns of a schema, or of fields in one of them, that occur twice at the same level."""
    import pyarrow as pa

    fields = list(fields)
    names = [twice(field.name for field in fields)]
    for field in fields:
        kind = field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
            kind = kind.value_type
        if pa.types.is_struct(kind):
            names.append(doubled_fields(kind))
    return ", ".join(filter(None, names))


def check_batch(batch: "pa.RecordBatch") -> None:
    """Check a batch from an Arrow file before `arrow_rows` reads it.

    Parquet is decoded, but an Arrow file is mapped into memory as it is, and an invalid offset would crash the process.

    Raises:
        pa.ArrowInvalid: the batch is damaged. Invalid UTF-8 does not count as damage, except inside lists.
    """
    import pyarrow as pa

    for column in batch.columns:
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            if "UTF8" not in str(error) or _is_nested(column.type):
                raise


def arrow_rows(batch: "pa.RecordBatch") -> Iterator[tuple[Mapping[str, Any], Problem | None]]:
    """Yield each row of `batch` by column, with its problem if it has one.

    Invalid bytes in text become lone surrogates, as in CSV, which a row check refuses if the text is used. A date or
    number that Python cannot represent becomes an `Unheld`.
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
    except _UNHELD:  # one cell of the batch is bad: look at each row by itself
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        rows = [{name: _held(column[n]) for name, column in columns.items()} for n in range(batch.num_rows)]
    nested = any(_is_nested(field.type) for field in batch.schema)
    for row in rows:
        deep = nested and depth_of(row) > DEEPEST
        yield row, Problem("readable", TOO_DEEP) if deep else None


def _is_nested(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_nested(kind))


def _held(cell: Any) -> Any:
    import pyarrow as pa

    try:
        return cell.as_py()
    except _UNHELD:
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
