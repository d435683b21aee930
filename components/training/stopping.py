"""Told to stop by a signal, a training loop finishes its step first.

Nothing here happens to a program that doesn't ask for it (`graceful`): the handlers of signals are the program's own.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_graceful = threading.Event()


class Interrupted(KeyboardInterrupt):
    """Told to stop by another signal than Ctrl-C's: whatever Ctrl-C ends in order, this does."""

    def __init__(self, number: int = signal.SIGTERM, why: str = "") -> None:
        super().__init__(why)
        self.number = number


@contextlib.contextmanager
def graceful() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise `Interrupted`; where a loop has `Held` signals, they wait for its step's end.

    What is ignored stays so: SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, _interrupt)
    _graceful.set()
    try:
        yield
    finally:
        _graceful.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)


class Held:
    """Inside, the first signal to stop only sets `told`; `deliver` passes it on to whoever handled it before.

    A second signal doesn't wait. Leaving delivers too. Outside `graceful`, and in a thread, signals do what they always
    do.
    """

    def __init__(self) -> None:
        self.told: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Held":
        if _graceful.is_set() and threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # What is ignored stays so (Ctrl-C, in a shell's background job); None is a handler that isn't Python's.
            self._before = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._let_go()
        if kind is None:
            self.deliver()

    def deliver(self) -> None:
        """Have the signal that was held do what it does; nothing where there was none."""
        if self.told is not None:
            number, self.told = self.told, None
            self._let_go()
            signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        again, self.told = self.told is not None, number
        if again:
            self.deliver()
            return
        name = signal.Signals(number).name
        logger.warning("%s: finishing this step, then stopping; a second signal stops at once", name)

    def _let_go(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def drop_output() -> None:
    """Send the rest of standard output nowhere, so that the interpreter does not stumble over it at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
