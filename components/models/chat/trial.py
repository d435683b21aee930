"""Call a function on untrusted input in a forked process of limited time and memory."""

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

from components.base.errors import TetherError
from components.distributed.orphans import die_with_parent

MEMORY = 2 << 30
"""Bytes that the function may allocate."""
ASLEEP = 5.0
"""Seconds without work after which a process waits for a lock that another thread held when it was forked."""


def failure_of(function: Callable[[], object], seconds: int, attempts: int = 3) -> str | None:
    """Return why `function` fails; None if it returns. Its effects stay in the forked process.

    A process is needed, because neither signals nor threads stop one long operation of the interpreter, such as a
    power. A fork imports nothing, so `seconds` of processor time are the function's alone, on a slow host too. One that
    waits for a lock of another thread (`ASLEEP`) is forked again.

    Raises:
        TetherError: each of the `attempts` waited for such a lock.
    """
    (reading, writing), parent = os.pipe(), os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the child calls Python code alone, and ends
        child = os.fork()
    if not child:
        try:
            die_with_parent(parent)  # it holds the parent's locks and pipes
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
            function()
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}"[:400].encode(errors="replace"))
        finally:
            os._exit(0)
    os.close(writing)
    asleep, ended = 0.0, (0, 0)
    with open(reading, "rb") as pipe:
        while not ended[0] and asleep < ASLEEP:
            time.sleep(0.01)
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
            asleep = asleep + 0.01 if state == "S" else 0.0
            ended = os.waitpid(child, os.WNOHANG)
        if not ended[0]:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if attempts > 1:
                return failure_of(function, seconds, attempts - 1)
            raise TetherError("a chat template could not be tried: other threads held locks. Run it again.")
        reason = pipe.read().decode(errors="replace")
    if ended[1] or reason.startswith("MemoryError"):
        return f"it takes more than {seconds} s or {MEMORY >> 30} GiB"
    return reason or None
