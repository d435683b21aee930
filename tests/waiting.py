"""Waiting for what another process does. How long may differ by far: two tests share two cores, and machines differ."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4
"""Times the seconds that a test names: those of a quiet machine. Another is half as fast, with a second test to run."""


def until(
    what: str, look: Callable[[], T], seconds: float = 120, failed: Callable[[], object] = lambda: None,
    every: float = 0.3,
) -> T:  # fmt: skip
    """What `look` finds, as soon as it finds something; prints how long that took.

    Fails after `PATIENCE * seconds`, and as soon as `failed` returns why it can never come: anything but None and "".
    """
    began = time.monotonic()
    while True:
        why = failed()  # asked first: what has ended may have left what is looked for
        if found := look():
            break
        assert why in (None, ""), f"{what}: {why}"
        assert time.monotonic() - began < PATIENCE * seconds, f"{what}: not within {PATIENCE * seconds} s"
        time.sleep(every)
    print(f"{time.monotonic() - began:6.1f} s  {what}")
    return found
