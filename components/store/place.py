"""The interface to wherever a store is kept. `folder` implements it for folders, `url` for URLs."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from components.base.paths import LARGEST_READ as LARGEST_READ

VARIABLE = "TETHER_STORE"
"""The environment variable with the store's folder or fsspec URL. If unset, the store is HOME/store."""


class Entry(NamedTuple):
    """A file of a place."""

    name: str
    """Relative to the folder that was asked for."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970 by the place's own clock."""


class Place(Protocol):
    """Files by name (`objects/<sha256>`, `records/<key>/<attempt>.<stage>.json`, `pins/<run>.json`). Each is written
    atomically."""

    where: str
    """For people: the folder, or the URL."""
    exclusive: bool
    """Whether `create` fails if another computer created the file first. If not, callers must choose unique names."""
    has_locks: bool
    """Whether `using` and `collecting` exclude each other. If not, what was written lately must not be collected."""

    def entries(self, folder: str) -> list[Entry]:
        """Return every file below `folder`, at any depth."""

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes; None if it does not exist."""

    def read(self, name: str) -> bytes:
        """Return a small file's bytes.

        Raises:
            FileNotFoundError: it does not exist. OSError: it has over `LARGEST_READ` bytes.
        """

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file's bytes in chunks; the file must exist."""

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to `name`, and overwrite what is there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; return False and write nothing if it exists."""

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Prevent garbage collection while files are needed that no record or run names yet."""

    def collecting(self) -> contextlib.AbstractContextManager[None]:
        """Keep all users out while garbage is collected."""
