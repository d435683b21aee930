"""Identify processes, so that a dead process is not mistaken for a running one that has the same id."""

import functools
import hashlib
import json
import os
import socket
from pathlib import Path

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict


class ProcessSpace(TypedDict, total=False):
    """The scope in which a process id is unique: one boot of one kernel, and one PID namespace."""

    boot: str
    pid_namespace: str


@with_config(ConfigDict(extra="allow"))
class Process(ProcessSpace, total=False):
    """A process as JSON files describe it; empty for none."""

    host: str
    pid: int
    started: str


def this_process() -> Process:
    """Describe this process by its scope, id and start time (ids are reused; an id with its start time is not)."""
    return describe_process(os.getpid())


def describe_process(pid: int) -> Process:
    """Describe the process `pid` of this host as `this_process` does."""
    return {"host": socket.gethostname(), **_place(), "pid": pid, "started": _start_time(pid) or ""}


def is_alive(process: Process) -> bool:
    """Return whether a process still runs. True for a process of another host or container, which we cannot see."""
    if process.get("host") != socket.gethostname():
        return True
    if process.get("boot", _place()["boot"]) != _place()["boot"]:
        return False  # this machine was rebooted since
    if process.get("pid_namespace", _place()["pid_namespace"]) != _place()["pid_namespace"]:
        return True
    started = _start_time(process.get("pid", 0))
    return started is not None and started == process.get("started")  # a damaged file lacks either


def process_mark() -> str:
    """Return a word that identifies this process, fit for a file's name."""
    return f"{_place_mark()}-{os.getpid()}-{_start_time(os.getpid())}"


def is_dead_mark(mark: str) -> bool:
    """Return whether `mark` is from a process of this boot and container that no longer runs."""
    place, _, process = mark.partition("-")
    pid, _, started = process.partition("-")
    return place == _place_mark() and pid.isdigit() and _start_time(int(pid)) != started


def is_mark_from_here(mark: str) -> bool:
    """Return whether `mark` is from a process of this boot and container, running or not."""
    return mark.partition("-")[0] == _place_mark()


def _place_mark() -> str:
    return hashlib.sha256(json.dumps(_place()).encode()).hexdigest()[:8]


@functools.cache
def _place() -> ProcessSpace:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return {"boot": boot, "pid_namespace": os.readlink("/proc/self/ns/pid")}
    except OSError:
        return {"boot": "", "pid_namespace": ""}


def _start_time(pid: int) -> str | None:
    """Return a start time in clock ticks since boot (field 22 of /proc/PID/stat); None if no such process runs."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may itself hold spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else fields[19]  # a zombie is no live process
