"""Call a function on untrusted input in a forked process of limited time and memory."""

import os
import resource
import signal
import warnings
from collections.abc import Callable
from pathlib import Path

MEMORY = 2 << 30
"""Bytes that the function may allocate, on Linux."""


def failure_of(function: Callable[[], object], seconds: int) -> str | None:
    """Return why `function` fails; None if it returns. Its effects stay in the forked process.

    A process is needed, because neither signals nor threads stop one long operation of the interpreter, such as a
    power. A fork imports nothing, so `seconds` of processor time are the function's alone, on a slow host too.
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls Python code alone, and ends
        child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(60 * seconds)  # it may wait for a lock that another thread held
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            if (statm := Path("/proc/self/statm")).exists():
                most = int(statm.read_text().split()[0]) * resource.getpagesize() + MEMORY
                resource.setrlimit(resource.RLIMIT_AS, (most, most))
            function()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}"[:400].encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        reason = pipe.read().decode(errors="replace")
    if os.waitpid(child, 0)[1] or reason.startswith("MemoryError"):
        return f"it takes more than {seconds} s or {MEMORY >> 30} GiB"
    return reason or None
