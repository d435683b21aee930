"""Shards of rows on disk: the measures of some thousand rows in one Arrow file, which is written completely or not at
all.

A shard is the unit of parallel work, and of resuming an interrupted validation. Only requested data are in memory: one
column of all rows, or all columns of some rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming
from components.base.files import replacing

NOTES = b"tether"
"""The metadata key of a shard's notes."""
_AT_ONCE = 1_000
"""Number of text lines in memory at once."""


def write_shard(path: Path, columns: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Write a shard completely or not at all.

    Args:
        columns: values (n,) or (n, k) of each row: numbers, or a list of bytes or of lists of integers.
        notes: further information about the rows, as JSON.
    """
    import pyarrow as pa

    stored = {name: _arrow(values) for name, values in columns.items()}
    metadata = {NOTES: json.dumps(notes).encode()}
    schema = pa.schema([(name, values.type) for name, values in stored.items()], metadata=metadata)
    with replacing(path) as temporary, pa.OSFile(str(temporary), "wb") as out, pa.ipc.new_file(out, schema) as writer:
        writer.write_batch(pa.record_batch(list(stored.values()), schema=schema))


def _arrow(values: Any) -> Any:
    import pyarrow as pa

    if isinstance(values, list):
        of_lists = bool(values) and isinstance(values[0], list)
        return pa.array(values, pa.list_(pa.int64()) if of_lists else pa.large_binary())
    values = np.ascontiguousarray(values)
    if values.dtype == np.bool_:
        values = values.view(np.uint8)
    if values.ndim == 2:
        return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])
    return pa.array(values)


def is_whole(path: Path) -> bool:
    """Return whether `path` is a complete, readable shard."""
    import pyarrow as pa

    if not path.is_file():
        return False
    try:
        with _batch(path):
            return True
    except (pa.ArrowInvalid, OSError):
        return False


@contextmanager
def _batch(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with naming(path), pa.memory_map(str(path)) as file:
        yield pa.ipc.open_file(file).get_batch(0)


class Shard:
    """A shard on disk; a column is read when requested."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _batch(path) as batch:
            self.rows: int = batch.num_rows
            self.names: frozenset[str] = frozenset(batch.schema.names)

    def notes(self) -> Any:
        """Return the notes stored with the columns."""
        with _batch(self.path) as batch:
            return json.loads(batch.schema.metadata[NOTES])

    def lists(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the entries (m,) of a column of lists, after the position (m,) of the row that has each."""
        import pyarrow.compute as pc

        with _batch(self.path) as batch:
            values = batch.column(name)
            return pc.list_parent_indices(values).to_numpy(), np.array(values.flatten().to_numpy())

    def column(self, name: str) -> NDArray[Any]:
        """Return the values (n,) or (n, k) of a numeric column."""
        import pyarrow as pa

        with _batch(self.path) as batch:
            values = batch.column(name)
            if isinstance(values.type, pa.FixedSizeListType):
                return np.array(values.flatten().to_numpy()).reshape(self.rows, values.type.list_size)
            return np.array(values.to_numpy())

    def texts(self, name: str, which: NDArray[np.int64] | None = None) -> Iterator[bytes]:
        """Yield the bytes of a column, for all rows or those at the positions `which`, with only some in memory at
        once."""
        with _batch(self.path) as batch:
            values = batch.column(name)
            for start in range(0, self.rows if which is None else len(which), _AT_ONCE):
                some = slice(start, start + _AT_ONCE)
                part = values[some] if which is None else values.take(which[some])
                yield from part.to_pylist()


class FactColumns:
    """The facts of all rows, with the interface of a structured array (n,): a file for each fact, mapped while its
    values are used."""

    def __init__(
        self, folder: Path, shards: Sequence[Shard], dtype: np.dtype[Any], in_memory: Sequence[str],
        codes: Mapping[str, Sequence[NDArray[Any]]],
    ) -> None:  # fmt: skip
        """Copy the facts of `shards` into `folder`.

        Args:
            in_memory: facts that stay in memory, since they change or are asked for row by row.
            codes: by fact, what each shard's codes mean in all of them; codes below 0 stay.
        """
        self.folder, self.dtype, self._rows = folder, dtype, sum(shard.rows for shard in shards)
        folder.mkdir(exist_ok=True)
        for name in dtype.names or ():
            with naming(folder), (folder / name).open("wb") as out:
                for number, shard in enumerate(shards):
                    values = shard.column(name)
                    if name in codes:
                        values = np.where(values < 0, values, np.append(codes[name][number], 0)[values])
                    out.write(np.ascontiguousarray(values, dtype[name].base).tobytes())
        self._in_memory: dict[str, NDArray[Any]] = {}
        self._in_memory = {name: self[name].copy() for name in in_memory}

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return SomeFacts(self, which)
        if which in self._in_memory:
            return self._in_memory[which]
        kind, shape = self.dtype[which], (self._rows, *self.dtype[which].shape)
        if not self._rows:
            return np.empty(shape, kind.base)
        return np.asarray(np.memmap(self.folder / which, kind.base, "r", shape=shape))


class SomeFacts:
    """The facts of some rows, selected by a slice, a mask or indices."""

    def __init__(self, facts: FactColumns, which: Any) -> None:
        self._facts, self._which = facts, which

    def __len__(self) -> int:
        return len(np.arange(len(self._facts))[self._which])

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return self._facts[which][self._which]
        return SomeFacts(self._facts, np.arange(len(self._facts))[self._which][which])
