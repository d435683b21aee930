"""Where a store is kept: one small interface. A folder is in `folder`, a URL in `url`."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

VARIABLE = "TETHER_STORE"
"""Names another folder or an fsspec URL for the store; unset: HOME/store."""


LARGEST_READ = 64 << 20
"""Bytes of the largest file that `read` takes into memory: a record or a pin has some kilobytes."""


class Entry(NamedTuple):
    """A file of a place."""

    name: str
    """Relative to the folder that was asked for."""
    size: int
    """Bytes."""
    modified: float
    """Seconds since 1970 by the place's own clock."""


class Place(Protocol):
    """Files by name (`objects/<sha256>`, `records/<key>/<attempt>.<stage>.json`, `pins/<run>.json`), each whole."""

    where: str
    """For people: the folder, or the URL."""
    exclusive: bool
    """Whether `create` is refused where another computer was first; else names have to be unique."""

    def entries(self, folder: str) -> list[Entry]:
        """Every file below `folder`, however deep."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None where there is none."""

    def read(self, name: str) -> bytes:
        """A small file. Raises FileNotFoundError where there is none, and OSError where it has over `LARGEST_READ`."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """A file, piece by piece; it has to be there."""

    def put(self, name: str, source: Path) -> None:
        """Copy a local file to `name`, over what is there."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file; False, and nothing is written, where there is one."""

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    def using(self) -> contextlib.AbstractContextManager[None]:
        """Held while files are needed that no record or run names yet: nobody collects garbage meanwhile."""

    def collecting(self) -> contextlib.AbstractContextManager[float]:
        """Held while garbage is collected: nobody uses the place meanwhile. Gives the time by the place's clock."""
