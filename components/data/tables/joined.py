"""Rows of several sequences as one, none of them in memory: of splits, of files of JSON Lines, and of lists."""

import json
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.data.tables.published import BATCH, rows_at


class JsonlRows(Sequence[Any]):
    """The rows of a file of JSON Lines, or some of them; each is read on access. Memory use is 8 bytes a row."""

    def __init__(self, path: Path, offsets: NDArray[np.int64] | None = None) -> None:
        """`offsets` (n,) are the bytes at which the rows' lines start; None means all lines."""
        if offsets is None:
            starts, at = array("q"), 0
            with path.open("rb") as lines:
                for line in lines:
                    starts.append(at)
                    at += len(line)
            offsets = np.array(starts, np.int64)
        self.path, self._offsets = path, offsets

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return JsonlRows(self.path, self._offsets[which])
        return next(iter(JsonlRows(self.path, self._offsets[[which]])))

    def __iter__(self) -> Iterator[Any]:
        with self.path.open("rb") as lines:
            for offset in self._offsets.tolist():
                lines.seek(offset)
                yield json.loads(lines.readline())

    def choose(self, which: NDArray[np.int64]) -> "JsonlRows":
        """Return the rows at the indices `which` (m,), in their order."""
        return JsonlRows(self.path, self._offsets[which])


class JoinedRows(Sequence[Any]):
    """Rows of several sequences, or some of them, in any order; each is read on access. Memory use is 8 bytes a row,
    and 8 for each kind of key."""

    def __init__(
        self, parts: Sequence[Sequence[Any]], places: NDArray[np.int64] | None = None,
        keys: Mapping[str, NDArray[np.uint64]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            places: the rows' indices (n,) in all `parts` together; None means all, in order.
            keys: the rows' known keys (n,), by kind.
        """
        self.parts, self._starts = parts, np.cumsum([0, *map(len, parts)])
        self._places = np.arange(self._starts[-1]) if places is None else places
        self._keys = dict(keys or {})

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, slice):
            return self.choose(np.arange(len(self))[which])
        place = self._places[which]
        part = int(np.searchsorted(self._starts, place, "right")) - 1
        return self.parts[part][int(place - self._starts[part])]

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self), BATCH):
            places = self._places[start : start + BATCH]
            part = np.searchsorted(self._starts, places, "right") - 1
            for run in np.split(np.arange(len(places)), np.flatnonzero(np.diff(part)) + 1):
                here = int(part[run[0]])
                yield from rows_at(self.parts[here], (places[run] - self._starts[here]).tolist())

    def choose(self, which: NDArray[np.int64]) -> "JoinedRows":
        """Return the rows at the indices `which` (m,), in their order."""
        keys = {kind: values[which] for kind, values in self._keys.items()}
        return JoinedRows(self.parts, self._places[which], keys)

    def keys(self, kind: str, key: Callable[[Any], bytes]) -> NDArray[np.uint64]:
        """Return the keys (n,) of the rows. They are computed once, and `choose` takes them along.

        Args:
            key: computes a row's 8 bytes.
        """
        if kind not in self._keys:
            if len(self._places) == self._starts[-1] and all(isinstance(part, JoinedRows) for part in self.parts):
                every = [part.keys(kind, key) for part in self.parts if isinstance(part, JoinedRows)]
                self._keys[kind] = np.concatenate([np.empty(0, np.uint64), *every])[self._places]
            else:
                self._keys[kind] = keys_of(iter(self), key)
        return self._keys[kind]


def keys_of(rows: Iterator[Any], key: Callable[[Any], bytes]) -> NDArray[np.uint64]:
    """Return the 8 bytes that `key` gives for each row as a number (n,)."""
    return np.fromiter((int.from_bytes(key(row), "little") for row in rows), np.uint64)
