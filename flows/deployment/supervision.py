"""Processes that are started again by themselves where they end: the others, and what they compute, go on."""

import os
import pwd
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

STOP_SECONDS = 30.0
AGAIN_SECONDS = (1.0, 60.0)
"""How long a part that ended waits to be started again: at first, doubled each time, and at most."""
STEADY_SECONDS = 60.0
"""A part that ran for so long waits as at first."""
LOOK_SECONDS = 0.5
BARE = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""What a program that is not of Python gets of this process's environment."""

Say = Callable[[str], Any]


class Service(NamedTuple):
    """Something to start, and what a person is told of it."""

    name: str
    address: str
    command: list[str] | None
    """None where the user's own server is used."""
    health: str | None = None
    """Answers once it is up; None for what serves no page."""
    environment: Mapping[str, str] = MappingProxyType({})
    bare: bool = False
    """Whether the environment is this and `BARE` alone; else this over the whole of the parent's."""
    user: str | None = None
    """Who runs it, where that is somebody else."""
    stop: signal.Signals = signal.SIGTERM
    """Ends it in order."""


class Running(Protocol):
    """A process: a `subprocess.Popen`, or one that another process started."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """Return how it ended, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Return how it ended, once it has; raises `subprocess.TimeoutExpired`."""
        ...


class Supervised:
    """A service that this process runs, and starts again by itself where it ends.

    Args:
        service: what to run; it has a command.
        log: what it prints is added there; None where it prints to where this process does.
        running: its process, where an earlier parent left it at work.
    """

    def __init__(self, service: Service, log: Path | None, running: Running | None = None) -> None:
        self.service, self._log = service, log
        self._wait = AGAIN_SECONDS[0]
        self._due: float | None = None
        """When it is to be started again; None while it runs."""
        self.process = running or self._started()
        self._since = time.monotonic()

    def _started(self) -> Running:
        service = self.service
        assert service.command is not None
        inherited = {name: os.environ[name] for name in BARE if name in os.environ} if service.bare else os.environ
        environment = {**inherited, **service.environment}
        user: dict[str, Any] = {}
        if service.user is not None:
            entry = pwd.getpwnam(service.user)
            user = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
            environment["HOME"] = entry.pw_dir
        with nullcontext() if self._log is None else self._log.open("ab") as log:
            # A session of its own: it has children, and Ctrl-C is ours to pass on.
            return subprocess.Popen(
                service.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment, **user,
            )  # fmt: skip

    def look(self, say: Say) -> None:
        """Start it again, after a while, where it has ended."""
        now = time.monotonic()
        if self._due is not None:
            if now >= self._due:
                self.process, self._since, self._due = self._started(), now, None
            return
        if self.process.poll() is None:
            return
        end_processes([self.process])  # children that outlived it may hold its port
        if now - self._since > STEADY_SECONDS:
            self._wait = AGAIN_SECONDS[0]
        self._due = now + self._wait
        see = "" if self._log is None else f"; see {self._log}"
        ended = f"{self.service.name} ended with code {self.process.returncode}"
        say(f"{ended} and is started again in {self._wait:.0f} s{see}")
        self._wait = min(2 * self._wait, AGAIN_SECONDS[1])


def end_processes(processes: Collection[Running], first: signal.Signals = signal.SIGTERM) -> None:
    """End processes, all at once, and their children, which are in process groups of ours.

    Args:
        processes: each leads a process group.
        first: asks them to end; `SIGKILL` follows after `STOP_SECONDS`.
    """
    for sign, patience in ((first, STOP_SECONDS), (signal.SIGKILL, 5.0)):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
        deadline = time.monotonic() + patience
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
    for process in processes:
        process.wait()
