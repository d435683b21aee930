"""A lock that outlives no holder: on one machine, or over a folder that several machines share.

<folder>/000000007.held   who holds it (JSON); its time of modification, changed every few seconds, is the heartbeat
<folder>/000000007.free   the same file, renamed when it was given back

Who wants the lock makes the next number once the highest is free or its holder is dead. A holder that sees a number
above its own was taken for dead (it was suspended for too long) and has lost the lock: numbers only rise ("fencing
tokens"; Kleppmann 2016, "How to do distributed locking"). The highest file stays, so that no number is used twice.

Clocks aren't compared: a waiter believes a heartbeat dead when its own monotonic clock has gone on for `ttl` without
seeing it change, whatever times stand in the files.
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
from components.store.folder import open_regular

logger = logging.getLogger(__name__)

TTL_SECONDS = 60.0
"""A holder that can't be seen from here and whose heartbeat stands still for so long is taken to be dead."""
BEAT_SECONDS = 5.0
POLL_SECONDS = 0.5
_LONGEST = 1 << 16
"""Bytes that are read of who holds a lock."""


@dataclass(frozen=True)
class Lease:
    """A lock in this process's hands, as long as nobody took it away."""

    folder: Path
    number: int
    """Higher than that of whoever held the lock before."""

    @property
    def file(self) -> Path:
        """This lease's file while it is held."""
        return self.folder / _name(self.number, "held")

    def is_lost(self) -> bool:
        """Whether somebody else has taken the lock over."""
        try:
            # Opening asks the server even where a listing comes from an NFS client's cache; who takes over removes it.
            os.close(os.open(self.file, os.O_RDONLY | os.O_NONBLOCK))
            return _highest(self.folder) > self.number
        except OSError as error:
            return error.errno in (errno.ENOENT, errno.ESTALE)  # anything else is an outage, which tells nothing

    def check(self) -> None:
        """Go on only while the lock is held.

        Raises:
            LeaseLost: it isn't any more.
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
    """Hold the lock that `folder` is, and wait while another process or thread holds it. Nothing else may write there.

    Args:
        on_wait: called once, where the lock isn't to be had at once.
        ttl: seconds after which a heartbeat that doesn't change is a dead one. Of all who share the folder the same.
        beat, poll: seconds between heartbeats, and between looks of a waiter.
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
        # Not there: it was taken over, and is the other's to free.
        with contextlib.suppress(FileNotFoundError):
            os.rename(lease.file, folder / _name(lease.number, "free"))
            sync(folder)


def holder(folder: Path) -> Process | None:
    """The process that holds the lock `folder` and isn't known to be dead, as `this_process` describes it; or None."""
    number = _highest(folder)
    held = folder / _name(number, "held")
    if number == 0 or not held.exists() or (folder / _name(number, "free")).exists():
        return None
    process = _read(held)
    return None if process is not None and is_dead(process) else process or {}


def _acquire(folder: Path, on_wait: Callable[[], None] | None, ttl: float, poll: float) -> Lease:
    watch, said = _Watch(ttl, 4 * poll), False
    while True:
        make_folder(folder)
        highest = _highest(folder)
        if watch.is_over(folder, highest):
            lease = Lease(folder, highest + 1)
            if _create(lease):
                _clean(lease)
                return lease
        elif not said and on_wait is not None:
            said = True
            on_wait()
        else:
            time.sleep(poll)


class _Watch:
    """A waiter's memory of the heartbeat that it looks at."""

    def __init__(self, ttl: float, longest: float) -> None:
        self._ttl, self._longest = ttl, longest
        self._seen: tuple[int, int] | None = None
        self._unchanged, self._looked = 0.0, time.monotonic()

    def is_over(self, folder: Path, number: int) -> bool:
        """Whether the lease `number`, the highest, is free, or its holder dead."""
        held = folder / _name(number, "held")
        if number == 0 or (folder / _name(number, "free")).exists():
            return True
        try:
            descriptor = os.open(held, os.O_RDONLY | os.O_NONBLOCK)  # opened, so that an NFS client asks the server
            try:
                beat = os.fstat(descriptor).st_mtime_ns
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return False  # given back, or taken over, in this moment: look again
        now = time.monotonic()
        # A machine that sleeps stops its waiters too: what was longer than a few looks apart counts as no more.
        self._unchanged += min(now - self._looked, self._longest)
        self._looked = now
        if self._seen != (number, beat):
            self._seen, self._unchanged = (number, beat), 0.0
        process = _read(held)
        if process is not None and is_dead(process):
            return True
        if self._unchanged <= self._ttl:
            return False
        logger.warning("%s: its holder %s no longer responds; taking it over", folder.name, process)
        return True


def _create(lease: Lease) -> bool:
    """Make the lease's file, whole and only where there is none; False where somebody else was first."""
    draft, ours = temporary_beside(lease.file), False
    try:
        with naming(lease.file):
            draft.write_text(json.dumps(this_process()))
            sync(draft)
        with contextlib.suppress(FileExistsError):
            os.link(draft, lease.file)
            sync(lease.folder)  # a number that a power failure took back would be given to two holders
        # NFS may say that the file exists where the answer to our own request was lost; the number of links is true.
        ours = draft.stat().st_nlink == 2
    except FileNotFoundError:
        pass  # somebody cleans up here: look again
    finally:
        draft.unlink(missing_ok=True)
    # A number seen as the highest may be an old one by the time that its successor is made.
    if ours and (_highest(lease.folder) > lease.number or (lease.folder / _name(lease.number, "free")).exists()):
        lease.file.unlink(missing_ok=True)
        return False
    return ours


def _clean(lease: Lease) -> None:
    """Remove earlier numbers, and drafts of processes that were killed over them: of other machines', old ones."""
    sweep(lease.folder)
    for path in lease.folder.iterdir():
        number = _number(path.name)
        with contextlib.suppress(FileNotFoundError):  # its process removes it too
            old_draft = path.suffix == ".tmp" and time.time() - path.stat().st_mtime > TTL_SECONDS
            if old_draft or (number is not None and number < lease.number):
                path.unlink()


def _beat(lease: Lease, done: threading.Event, every: float) -> None:
    """Change the file's time until `done`, or until the lease is another's. An outage of the folder is sat out."""
    last = 0
    while not done.wait(every):
        last = max(last + 1, time.time_ns())  # another one each time, also where the clock was set back
        with contextlib.suppress(OSError):
            os.utime(lease.file, ns=(last, last))


def _read(file: Path) -> Process | None:
    """Who holds it; None where the file is gone or says nothing that can be understood."""
    try:
        with open_regular(file) as held:
            found = json.loads(held.read(_LONGEST))
    except (OSError, ValueError, RecursionError):
        return None
    told = isinstance(found, dict) and isinstance(found.get("pid"), int) and isinstance(found.get("started"), str)
    return Process(**found) if told else None


def _name(number: int, state: str) -> str:
    return f"{number:09d}.{state}"


def _number(name: str) -> int | None:
    number, _, state = name.partition(".")
    return int(number) if number.isdigit() and state in ("held", "free") else None


def _highest(folder: Path) -> int:
    """The highest number there, 0 of none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return 0
    return max((number for name in names if (number := _number(name)) is not None), default=0)
