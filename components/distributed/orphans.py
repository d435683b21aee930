"""Make a process die with its parent, so that no orphan continues to compute."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
"""A constant of Linux's sys/prctl.h."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends; `parent` is that process's id."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        sys.exit(1)
