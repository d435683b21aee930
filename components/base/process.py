"""Which process does something, so that one that died is not taken for one at work."""

import functools
import hashlib
import json
import os
import socket
from pathlib import Path

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


class ProcessSpace(TypedDict, total=False):
    """Where process ids mean the same: the kernel since it was started, and the namespace of process ids."""

    boot: str
    pid_namespace: str


@with_config(ConfigDict(extra="allow"))
class Process(ProcessSpace, total=False):
    """A process as a JSON file names it; empty for none."""

    host: str
    pid: int
    started: str


def this_process() -> Process:
    """This process, by where it is, id and start time (ids are used again, an id with its start time is not)."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> Process:
    """The process `pid` of this host, likewise."""
    return {"host": socket.gethostname(), **_place(), "pid": pid, "started": _start_time(pid) or ""}


def is_alive(process: Process) -> bool:
    """Whether the process that `this_process` described still runs. One that can't be seen from here is taken to."""
    if process.get("host") != socket.gethostname():
        return True
    if process.get("boot", _place()["boot"]) != _place()["boot"]:
        return False  # this machine has been started anew since
    if process.get("pid_namespace", _place()["pid_namespace"]) != _place()["pid_namespace"]:
        return True
    return _runs(process)


def is_dead(process: Process) -> bool:
    """Whether it is certain that the process no longer runs: it was one of this boot and this container, and is gone.

    Unlike `is_alive`, this doesn't believe a host's name: two machines, or containers, may have the same.
    """
    if any(process.get(name) != value or not value for name, value in _place().items()):
        return False
    return not _runs(process)


def _runs(process: Process) -> bool:
    """Whether a process of this place has that id and start time; none has, where a damaged file lacks one of them."""
    started = _start_time(process.get("pid", 0))
    return started is not None and started == process.get("started")


def process_mark() -> str:
    """Return a word that identifies this process, fit for a file's name."""
    return f"{_place_mark()}-{os.getpid()}-{_start_time(os.getpid())}"


def is_dead_mark(mark: str) -> bool:
    """Whether `process_mark` gave it in a process of this boot and container that no longer runs."""
    place, _, process = mark.partition("-")
    pid, _, started = process.partition("-")
    return place == _place_mark() and pid.isdigit() and _start_time(int(pid)) != started


def is_mark_from_here(mark: str) -> bool:
    """Whether `process_mark` gave it in a process of this boot and container, at work or gone."""
    return mark.partition("-")[0] == _place_mark()


def _place_mark() -> str:
    return hashlib.sha256(json.dumps(_place()).encode()).hexdigest()[:8]


@functools.cache
def _place() -> ProcessSpace:
    """Return this process's."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"boot": "", "pid_namespace": ""}


def _start_time(pid: int) -> str | None:
    """Start time in clock ticks since boot (field 22 of /proc/PID/stat), or None where there's no live process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]  # a zombie is no live process
