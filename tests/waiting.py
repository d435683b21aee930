"""Waiting for what another process does. How long may differ by far: two tests share two cores, and machines differ."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 4
"""Times the seconds that a test names: those of a quiet machine. Another is half as fast, with a second test to run."""


def until(what: str, look: Callable[[], T], seconds: float = 120) -> T:
    """What `look` finds, as soon as it finds something; prints how long that took. Fails after `PATIENCE * seconds`."""
    began = time.monotonic()
    while not (found := look()):
        assert time.monotonic() - began < PATIENCE * seconds, f"{what}: not within {PATIENCE * seconds} s"
        time.sleep(0.3)
    print(f"{time.monotonic() - began:6.1f} s  {what}")
    return found
