"""Rows of Arrow tables, of which one cell may be more than Python can hold: a bad row is one row's problem."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from components.base.strict_json import DEEPEST, TOO_DEEP, depth_of, twice
from components.data.rows import Problem

if TYPE_CHECKING:
    import pyarrow as pa

LARGEST_ROW = 16 * 2**20
"""Bytes of a row of an Arrow table."""
_UNHELD = (ArithmeticError, LookupError, NotImplementedError, TypeError, ValueError)
"""What pyarrow raises of one cell: its own errors, and those of Python's decoders, dates and time zones."""


class Unheld:
    """A cell that Python can't hold, such as a date after the year 9999. It has a type and no value."""

    def __init__(self, kind: object) -> None:
        self.kind = str(kind)

    def __repr__(self) -> str:
        return f"a {self.kind} that can't be read"


def doubled_fields(fields: Iterable[Any]) -> str:
    """The names of columns of a schema, or of fields inside one of them, that appear twice beside each other."""
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

    Text that is no UTF-8 has lone surrogates in place of the wrong bytes, as in CSV: a row check refuses it where
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
    except _UNHELD:  # of one cell in a thousand; each is then looked at by itself
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
