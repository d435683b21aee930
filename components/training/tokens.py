"""Token lists of a data set in a file instead of memory; training reads those of its current batch."""

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming

T = TypeVar("T")

CHUNK = 1_000
"""Number of rows that are tokenised at a time."""
_BUFFER = 2**18
"""Number of tokens that are written at a time."""


def chunks(rows: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Yield `rows` in lists of min(`size`, `CHUNK`); the last one may be shorter."""
    remaining = iter(rows)
    while chunk := list(islice(remaining, min(max(size, 1), CHUNK))):
        yield chunk


class _Unnamed:
    """A file without a name: it disappears with the object, however the process ends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        with naming(folder):
            self._number, name = tempfile.mkstemp(dir=folder, prefix="tokens-")
        os.unlink(name)
        weakref.finalize(self, os.close, self._number)

    def write(self, data: bytes) -> None:
        with naming(self.folder):
            while data:
                data = data[os.write(self._number, data) :]

    def read(self, length: int, place: int) -> bytes:
        return os.pread(self._number, length, place)


class TokenWriter:
    """Takes token lists one after the other; 4 bytes per token in an unnamed file, 12 bytes per list in memory."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` for the file, which goes when nobody reads it any more; None holds the tokens in memory."""
        self._file = None if folder is None else _Unnamed(folder)
        self._ids, self._lengths = array("i"), array("i")

    def __len__(self) -> int:
        return len(self._lengths)

    def append(self, ids: Sequence[int]) -> None:
        """Add a list."""
        self._ids.extend(ids)
        self._lengths.append(len(ids))
        if self._file is not None and len(self._ids) >= _BUFFER:
            self._file.write(self._ids.tobytes())
            self._ids = array("i")

    def written(self) -> "TokenLists":
        """Return all lists. No list may be added afterwards."""
        if self._file is not None:
            self._file.write(self._ids.tobytes())
        lengths = np.array(self._lengths, np.int32)
        starts = np.cumsum(lengths, dtype=np.int64) - lengths
        return TokenLists(self._ids if self._file is None else self._file, starts, lengths)


class TokenLists(Sequence[list[int]]):
    """n token lists, each read on access."""

    def __init__(self, store: Any, starts: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        """
        Args:
            store: a file of 32-bit integers (`read(length, place)` in bytes), or an array of them.
            starts: (n,) place of each list in it, in tokens.
            lengths: (n,) of each, in tokens.
        """
        self._store, self._starts, self.lengths = store, starts, lengths

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, which: int) -> list[int]: ...
    @overload
    def __getitem__(self, which: slice) -> "TokenLists": ...
    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return self.choose(np.arange(len(self))[which])
        start, length = int(self._starts[which]), int(self.lengths[which])
        if isinstance(self._store, array):
            return self._store[start : start + length].tolist()
        return array("i", self._store.read(4 * length, 4 * start)).tolist()

    def choose(self, which: NDArray[np.int64]) -> "TokenLists":
        """Return the lists at the indices `which` (m,)."""
        return TokenLists(self._store, self._starts[which], self.lengths[which])


class TokenStore(TokenLists):
    """n token lists that are set in any order, some at a time; 4 bytes per token in an unnamed file, 12 bytes per list
    in memory."""

    def __init__(self, folder: Path, count: int) -> None:
        """`folder` is for the file, which disappears when nobody reads it any more; `count` is n."""
        super().__init__(_Unnamed(folder), np.full(count, -1, np.int64), np.zeros(count, np.int32))
        self._end = 0

    def known(self, which: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the lists at the places `which` (m,) are set, (m,)."""
        return self._starts[which] >= 0

    def set(self, which: NDArray[np.int64], lists: Sequence[Sequence[int]]) -> None:
        """Set the lists at the places `which` (m,), which must not be set yet."""
        ids = array("i")
        for place, row in zip(which.tolist(), lists, strict=True):
            self._starts[place], self.lengths[place] = self._end + len(ids), len(row)
            ids.extend(row)
        self._store.write(ids.tobytes())
        self._end += len(ids)


def lengths_of(sequences: Sequence[Sequence[int]]) -> Sequence[int] | NDArray[np.int32]:
    """Return the number of tokens of each sequence. `TokenLists` know it without reading the tokens."""
    return sequences.lengths if isinstance(sequences, TokenLists) else [len(row) for row in sequences]
