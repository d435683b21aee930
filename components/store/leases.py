"""A lock that the system frees when its holder dies, on one machine or in a folder that several machines share (flock).

The locked file has its newest holder's number. A file server frees the lock of a machine that it can't reach, and that
machine's holder, suspended or cut off, goes on: it has lost the lock once the file has another number than its own.
Numbers only rise ("fencing tokens"; Kleppmann 2016, "How to do distributed locking"), and the file stays, so that no
number is used twice.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from components.base.errors import LeaseLost, UserError, naming
from components.base.files import make_folder, sync


@dataclass(frozen=True)
class Lease:
    """A lock that this process holds, unless another process has taken it over."""

    file: Path
    number: int
    """Higher than the number of every earlier holder."""

    def is_lost(self) -> bool:
        """Return whether another process has taken the lock over."""
        try:
            # An NFS client may read from its cache, but opening asks the server.
            with _opened(self.file, os.O_RDONLY) as file:
                return _number(file) != self.number
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESTALE)  # other errors are outages, not a take-over

    def check(self) -> None:
        """Check that the lock is still held.

        Raises:
            LeaseLost: another process has taken it over.
        """
        if self.is_lost():
            raise LeaseLost(
                f"another process took over {self.file.name}: this one was cut off from the file server, or the file "
                "was removed. What this one computed since is discarded. Run the same command again: it waits for the "
                "other's result and uses it."
            )


@contextlib.contextmanager
def leased(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[Lease]:
    """Hold the lock of the file `path`; wait while another process or thread holds it.

    Args:
        on_wait: called once if the lock is not free at once.

    Raises:
        UserError: the file system of `path` has no locks.
    """
    make_folder(path.parent)
    with _opened(path, os.O_RDWR | os.O_CREAT) as file:
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):
                raise
            raise UserError(
                f"{path.parent}: this file system has no file locks ({error.strerror}). Mount it with locks (NFS 4; "
                "Lustre with -o flock), or name another folder in TETHER_HOME."
            ) from error
        number = _number(file) + 1
        with naming(path):
            os.pwrite(file, b"%09d\n" % number, 0)
            os.fsync(file)
            if number == 1:
                sync(path.parent)
        yield Lease(path, number)


@contextlib.contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Hold the lock of the file `path` if no other process does; yields whether this one holds it."""

    def give_up() -> None:
        raise _InUse

    try:
        with leased(path, give_up):
            yield True
    except _InUse:
        yield False


class _InUse(Exception):
    """Another process holds the lock."""


def is_held(path: Path) -> bool:
    """Return whether a process holds the lock of the file `path`."""
    with _opened(path, os.O_RDONLY) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags, 0o666)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # frees the lock


def _number(file: int) -> int:
    text = os.pread(file, 9, 0)
    return int(text) if text.isdigit() else 0
