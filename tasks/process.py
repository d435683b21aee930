"""Which process does something, so that one that died is not taken for one at work."""

import os
import socket
from pathlib import Path


def this_process() -> dict[str, str | int]:
    """This process by host, id and start time (ids are used again, an id with its start time is not)."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> dict[str, str | int]:
    """The process `pid` of this host, likewise."""
    return {"host": socket.gethostname(), "pid": pid, "started": _start_time(pid) or ""}


def is_alive(process: dict[str, str | int]) -> bool:
    """Whether the process that `this_process` described still runs. One on another host is taken to be alive."""
    if process.get("host") != socket.gethostname():
        return True
    return _start_time(int(process["pid"])) == process["started"]


def _start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat), or None where there's no live process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    zombie = fields[0] in ("Z", "X")
    return None if zombie else fields[19]
