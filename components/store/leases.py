"""A lock that is freed when its holder dies, on one machine or in a folder that several machines share.

<folder>/000000007.held   who holds it (JSON); its time of modification, changed every few seconds, is the heartbeat
<folder>/000000007.free   the same file, renamed when the lock was released

A process takes the lock by creating the next number, once the highest one is free or its holder is dead. A holder that
sees a number above its own has lost the lock: it was suspended for so long that it was taken for dead. Numbers only
rise ("fencing tokens"; Kleppmann 2016, "How to do distributed locking"), and the highest file stays, so that no number
is used twice. Clocks are not compared: a waiter takes a holder for dead when the heartbeat has not changed for `ttl`
seconds of the waiter's own monotonic clock, whatever times the files have.
"""

import contextlib
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from components.base.errors import LeaseLost, naming
from components.base.files import make_folder, sweep, sync, temporary_beside
from components.base.process import Process, is_dead, this_process

logger = logging.getLogger(__name__)

TTL_SECONDS = 60.0
"""Seconds without a heartbeat after which a holder on another machine or in another container is taken for dead."""
BEAT_SECONDS = 5.0
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Lease:
    """A lock that this process holds, unless another process has taken it over."""

    folder: Path
    number: int
    """Higher than the number of every earlier holder."""

    @property
    def file(self) -> Path:
        """Return this lease's file while the lock is held."""
        return self.folder / _name(self.number, "held")

    def is_lost(self) -> bool:
        """Return whether another process has taken the lock over."""
        try:
            # An NFS client may list from its cache, but opening asks the server. Whoever takes over removes this file.
            os.close(os.open(self.file, os.O_RDONLY))
            return _highest(self.folder) > self.number
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESTALE)  # other errors are outages, not a take-over

    def check(self) -> None:
        """Check that the lock is still held.

        Raises:
            LeaseLost: another process has taken it over.
        """
        if self.is_lost():
            raise LeaseLost(
                f"this process was suspended for so long that another one took over {self.folder.name}; what it "
                "computed since is discarded. Run the same command again: it waits for the other's result and uses it."
            )


@contextlib.contextmanager
def leased(
    folder: Path,
    on_wait: Callable[[], None] | None = None,
    *,
    ttl: float = TTL_SECONDS,
    beat: float = BEAT_SECONDS,
    poll: float = POLL_SECONDS,
) -> Iterator[Lease]:
    """Hold the lock of `folder`; wait while another process or thread holds it. Nothing else may write there.

    Args:
        on_wait: called once if the lock is not free at once.
        ttl: seconds without a heartbeat after which a holder is taken for dead; the same for all who share the folder.
        beat, poll: seconds between heartbeats, and between a waiter's checks.
    """
    lease = _acquire(folder, on_wait, ttl, poll)
    done = threading.Event()
    heart = threading.Thread(target=_beat, args=(lease, done, beat), name=f"lease {folder.name}", daemon=True)
    heart.start()
    try:
        yield lease
    finally:
        done.set()
        heart.join()
        # If the file is missing, the lock was taken over, and its new holder frees it.
        with contextlib.suppress(FileNotFoundError):
            os.rename(lease.file, folder / _name(lease.number, "free"))
            sync(folder)


def holder(folder: Path) -> Process | None:
    """Return the process that holds the lock of `folder`, unless it is known to be dead; else None."""
    number = _highest(folder)
    file = folder / _name(number, "held")
    if number == 0 or not file.exists() or (folder / _name(number, "free")).exists():
        return None
    process = _read(file)
    return None if process is not None and is_dead(process) else process or {}


def _acquire(folder: Path, on_wait: Callable[[], None] | None, ttl: float, poll: float) -> Lease:
    heartbeat, notified = _Heartbeat(ttl, 4 * poll), False
    while True:
        make_folder(folder)
        highest = _highest(folder)
        if heartbeat.is_over(folder, highest):
            lease = Lease(folder, highest + 1)
            if _create(lease):
                _clean(lease)
                return lease
        elif not notified and on_wait is not None:
            notified = True
            on_wait()
        else:
            time.sleep(poll)


class _Heartbeat:
    """A waiter's record of the heartbeat that it watches."""

    def __init__(self, ttl: float, longest: float) -> None:
        self._ttl, self._longest = ttl, longest
        self._seen: tuple[int, int] | None = None
        self._unchanged, self._looked = 0.0, time.monotonic()

    def is_over(self, folder: Path, number: int) -> bool:
        """Return whether the lease `number`, the highest, is free, or its holder is dead."""
        file = folder / _name(number, "held")
        if number == 0 or (folder / _name(number, "free")).exists():
            return True
        try:
            descriptor = os.open(file, os.O_RDONLY)  # opened, so that an NFS client asks the server
            try:
                beat = os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return False  # released or taken over just now: look again
        now = time.monotonic()
        # A sleeping machine stops its waiters too, so a long gap between two looks counts only as `longest`.
        self._unchanged += min(now - self._looked, self._longest)
        self._looked = now
        if self._seen != (number, beat):
            self._seen, self._unchanged = (number, beat), 0.0
        process = _read(file)
        if process is not None and is_dead(process):
            return True
        if self._unchanged <= self._ttl:
            return False
        logger.warning("%s: its holder %s no longer responds; taking it over", folder.name, process)
        return True


def _create(lease: Lease) -> bool:
    """Create the lease's file atomically; return False if another process was first."""
    draft, ours = temporary_beside(lease.file), False
    try:
        with naming(lease.file):
            draft.write_text(json.dumps(this_process()))
            sync(draft)
        with contextlib.suppress(FileExistsError):
            os.link(draft, lease.file)
            sync(lease.folder)  # else a power failure could lose the number, and two holders get it
        # If the answer to our request was lost, NFS may report that the file exists; its link count shows the truth.
        ours = draft.stat().st_nlink == 2
    except FileNotFoundError:
        pass  # another process removed the draft: look again
    finally:
        draft.unlink(missing_ok=True)
    # A number that was the highest when we looked may be outdated by the time that we create its successor.
    if ours and (_highest(lease.folder) > lease.number or (lease.folder / _name(lease.number, "free")).exists()):
        lease.file.unlink(missing_ok=True)
        return False
    return ours


def _clean(lease: Lease) -> None:
    """Remove earlier numbers, and the drafts of killed processes; drafts of other machines only when they are old."""
    sweep(lease.folder)
    for path in lease.folder.iterdir():
        number = _number(path.name)
        with contextlib.suppress(FileNotFoundError):  # its own process may remove it first
            old_draft = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > TTL_SECONDS
            if old_draft or (number is not None and number < lease.number):
                path.unlink()


def _beat(lease: Lease, done: threading.Event, every: float) -> None:
    """Update the file's time until `done` is set or the lease is lost. While the folder is unreachable, keep trying."""
    last = 0
    while not done.wait(every):
        last = max(last + 1, time.time_ns())  # differs each time, even if the clock was set back
        with contextlib.suppress(OSError):
            os.utime(lease.file, ns=(last, last))


def _read(file: Path) -> Process | None:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(content, dict) or not isinstance(content.get("pid"), int):
        return None
    return Process(**content) if isinstance(content.get("started"), str) else None


def _name(number: int, state: str) -> str:
    return f"{number:09d}.{state}"


def _number(name: str) -> int | None:
    number, _, state = name.partition(".")
    return int(number) if number.isdigit() and state in ("held", "free") else None


def _highest(folder: Path) -> int:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    return max((number for name in names if (number := _number(name)) is not None), default=0)
