"""Let a training loop finish its step before it stops for a signal.

This applies only within `graceful`; elsewhere a program's own signal handlers stay in place.
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
    """The process was told to stop by SIGTERM or SIGHUP. It is handled like Ctrl-C's KeyboardInterrupt."""

    def __init__(self, number: int = signal.SIGTERM, why: str = "") -> None:
        super().__init__(why)
        self.number = number


@contextlib.contextmanager
def graceful() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise `Interrupted`; in a loop with `Held`, they wait for the step's end.

    Ignored signals stay ignored, such as SIGHUP under nohup.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can handle signals
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
    """Within the block, the first stop signal only sets `told`; `deliver` passes it to its previous handler.

    A second signal acts at once. Leaving the block delivers a held signal. Outside `graceful`, and in other threads,
    signals act as usual.
    """

    def __init__(self) -> None:
        self.told: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Held":
        if _graceful.is_set() and threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in SIGNALS}
            # Ignored signals stay ignored (Ctrl-C in a shell's background job); None is a handler not set by Python.
            self._before = {n: h for n, h in handlers.items() if h not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._hold)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._let_go()
        if kind is None:
            self.deliver()

    def deliver(self) -> None:
        """Pass a held signal to its previous handler; do nothing if there is none."""
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


def drop_output(stream: Any = None) -> None:
    """Discard the rest of a stream (standard output), so that the interpreter does not fail to flush it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), (stream or sys.stdout).fileno())


@contextlib.contextmanager
def unread_is_fine() -> Iterator[None]:
    """Ignore that standard output can't be written in this block, which prints what has been finished and stored."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        drop_output()
