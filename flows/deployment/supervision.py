"""Supervise processes: one that ends is restarted, while the others continue."""

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
"""Seconds until a part that ended is restarted: the first wait, which doubles each time, and the longest."""
STEADY_SECONDS = 60.0
"""A part that ran for this long waits the first time again."""
LOOK_SECONDS = 0.5
BARE = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR")
"""The variables of this process's environment that a `bare` service gets."""

Say = Callable[[str], Any]


class Service(NamedTuple):
    """Something to start, and how to describe it to a person."""

    name: str
    address: str
    command: list[str] | None
    """None if the user's own server is used."""
    health: str | None = None
    """A URL that answers once the service is up; None if it serves no page."""
    environment: Mapping[str, str] = MappingProxyType({})
    bare: bool = False
    """Whether it gets only `environment` and the variables in `BARE`; otherwise it inherits the whole environment."""
    user: str | None = None
    """The user who runs it, if it is not the current one."""
    stop: signal.Signals = signal.SIGTERM
    """The signal that stops it in order."""


class Running(Protocol):
    """A running process: a `subprocess.Popen`, or one that another process started."""

    pid: int
    returncode: Any

    def poll(self) -> int | None:
        """Return the exit code, or None while it runs."""
        ...

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return the exit code; raises `subprocess.TimeoutExpired`."""
        ...


class Supervised:
    """A service that this process runs, and restarts if it ends.

    Args:
        service: the service, which must have a command.
        log: the file to which its output is appended; None leaves the output with this process's.
        running: its process, if an earlier parent left it running.
    """

    def __init__(self, service: Service, log: Path | None, running: Running | None = None) -> None:
        self.service, self._log = service, log
        self._wait = AGAIN_SECONDS[0]
        self._due: float | None = None
        """When it is to be restarted; None while it runs."""
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
            # In a session of its own, because it has children and this process passes Ctrl-C on.
            return subprocess.Popen(
                service.command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True,
                env=environment, **user,
            )  # fmt: skip

    def look(self, say: Say) -> None:
        """If the process has ended, schedule its restart, or restart it once the wait is over."""
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
        say(f"{ended} and is restarted in {self._wait:.0f} s{see}")
        self._wait = min(2 * self._wait, AGAIN_SECONDS[1])


def end_processes(processes: Collection[Running], first: signal.Signals = signal.SIGTERM) -> None:
    """End processes and their children, all at once.

    Args:
        processes: each is the leader of its process group.
        first: the signal that asks them to end; `SIGKILL` follows after `STOP_SECONDS`.
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
