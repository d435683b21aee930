"""Which processes a stack has: a file that its keeper writes and every command reads."""

import subprocess
import time
from typing import Any

from pydantic import BaseModel

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.process import Process, is_alive, this_process
from flows.stack.config import Stack


class PartState(BaseModel):
    """A part as its keeper last saw it."""

    process: Process
    starts: int = 1
    """How often it was started."""


class StackState(BaseModel):
    """A stack as its keeper last saw it."""

    keeper: Process
    config: dict[str, Any]
    """What it was started with."""
    parts: dict[str, PartState] = {}

    def alive(self) -> list[str]:
        """Return the names of parts whose process runs."""
        return [name for name, part in self.parts.items() if runs(part.process)]


def runs(process: Process) -> bool:
    """Return whether a process of this machine and container runs; one of an earlier start of either does not."""
    here = this_process()
    places = ("host", "boot", "pid_namespace")
    return is_alive(process) and all(process.get(name) == here.get(name) for name in places)


def read_state(stack: Stack) -> StackState | None:
    """Return the state; None where nothing was started, or it is of before this machine was last started.

    Raises:
        UserError: the file is damaged, or the stack runs on another machine.
    """
    try:
        state = StackState.model_validate_json(stack.state.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise UserError(
            f"{stack.state} is damaged: what it named may still run. End it by hand (`ps` shows {stack.folder} in the "
            f"commands), and remove the file."
        ) from error
    host = this_process().get("host")
    if state.keeper.get("host") != host and is_alive(state.keeper):
        raise UserError(
            f"{stack.state}: the stack was started on {state.keeper.get('host')}, and this is {host}. Run the command "
            f"there; if it is gone, remove that file."
        )
    return state


def write_state(stack: Stack, state: StackState) -> None:
    """Write the state, whole."""
    write_whole(stack.state, state.model_dump_json(indent=1))


class Adopted:
    """A process that another one started: it can be ended and waited for, and has no exit code."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.pid = process.get("pid", 0)
        self.returncode: str | None = None

    def poll(self) -> int | None:
        """Return 0 once it no longer runs; nobody but its parent learns more."""
        if self.returncode is None and not runs(self._process):
            self.returncode = "unknown"
        return None if self.returncode is None else 0

    def wait(self, timeout: float | None = None) -> int:
        """Return 0 once it no longer runs.

        Raises:
            subprocess.TimeoutExpired: it still does.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.05)
        return 0
