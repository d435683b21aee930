"""Retry a stage after a breakdown, and stop one that takes too long.

A breakdown is a process that died, a lost lease or a failed connection: the stage may succeed when it is retried from
its checkpoint. A user's mistake, a failed gate or a failed check would fail again.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TypeVar

from components.base.errors import LeaseLost, StageTimeout, WorkerDied, is_unreachable

T = TypeVar("T")

LONGEST_WAIT_SECONDS = 3600.0


@dataclass(frozen=True)
class Attempts:
    """How often something is retried after a breakdown."""

    retries: int = 0
    seconds: float = 30.0
    """Wait before the first retry. Each further wait is twice as long, up to an hour."""

    def wait(self, retry: int) -> float:
        """Return the seconds to wait before a retry; the first has number 1."""
        return min(self.seconds * 2.0 ** (retry - 1), LONGEST_WAIT_SECONDS)


def is_breakdown(error: BaseException) -> bool:
    """Return whether the same call may succeed when it is retried."""
    return isinstance(error, (LeaseLost, WorkerDied)) or is_unreachable(error)


def through_breakdowns(call: Callable[[], T], attempts: Attempts, name: str, say: Callable[[str], object]) -> T:
    """Return the result of `call`, retried after each breakdown as `attempts` allows. The last error is raised."""
    retry = 0
    while True:
        try:
            return call()
        except Exception as error:
            if retry >= attempts.retries or not is_breakdown(error):
                raise
            retry += 1
            seconds = attempts.wait(retry)
            say(f"{name}: {error} Retry {retry} of {attempts.retries} in {seconds:.0f} s.")
        time.sleep(seconds)


@contextlib.contextmanager
def time_limit(seconds: float | None, name: str) -> Iterator[None]:
    """Raise in the block once it has taken `seconds`. A library's computation is interrupted only when it returns.

    This works only in the main thread; in other threads there is no limit.

    Raises:
        StageTimeout: the time is over; the message names the option that sets the limit.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise StageTimeout(
            f"{name} took longer than runners.{name.partition('.')[0]}.timeout = {seconds:g} s and was stopped. Run "
            "the same command again to continue from its last checkpoint; set a longer timeout if it needs more time."
        )

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
