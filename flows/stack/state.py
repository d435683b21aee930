"""The processes of a stack: a file that its keeper writes and every command reads."""

import subprocess
import time
from typing import Any

from pydantic import BaseModel

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.paths import read_regular
from components.base.process import Process, is_alive, this_process
from flows.stack.config import Stack


class PartState(BaseModel):
    """The keeper's last state of a part."""

    process: Process
    starts: int = 1
    """How often it has been started."""


class StackState(BaseModel):
    """The keeper's last state of a stack."""

    keeper: Process
    config: dict[str, Any]
    """The config it was started with."""
    parts: dict[str, PartState] = {}

    def alive(self) -> list[str]:
        """Return the names of the parts whose process is running."""
        return [name for name, part in self.parts.items() if runs(part.process)]


def runs(process: Process) -> bool:
    """Return whether a process of this machine and container is running. A process from before a restart is not."""
    here = this_process()
    places = ("host", "boot", "pid_namespace")
    return is_alive(process) and all(process.get(name) == here.get(name) for name in places)


def read_state(stack: Stack) -> StackState | None:
    """Return the state; None if nothing was started since this machine started.

    Raises:
        UserError: the file is damaged, or the stack is running on another machine.
    """
    try:
        state = StackState.model_validate_json(read_regular(stack.state))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{stack.state} is damaged: the processes it named may still be running. End them by hand (`ps` shows "
            f"{stack.folder} in their commands), and remove the file."
        ) from error
    host = this_process().get("host")
    if state.keeper.get("host") != host and is_alive(state.keeper):
        raise UserError(
            f"{stack.state}: the stack was started on {state.keeper.get('host')}, but this is {host}. Run the command "
            f"there; if that machine is gone, remove the file."
        )
    return state


def write_state(stack: Stack, state: StackState) -> None:
    """Write the state, replacing the file in one step."""
    write_whole(stack.state, state.model_dump_json(indent=1))


class Adopted:
    """A process that another process started: it can be stopped and waited for, but its exit code is unknown."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.get("pid", 0)
        self.returncode: str | None = None

    def poll(self) -> int | None:
        """Return 0 once the process no longer runs, or None. Only its parent could learn the exit code."""
        if self.returncode is None and not runs(self._process):
            self.returncode = "unknown"
        return None if self.returncode is None else 0

    def wait(self, timeout: float | None = None) -> int:
        """Return 0 once the process no longer runs.

        Raises:
            subprocess.TimeoutExpired: it is still running.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.05)
        return 0
