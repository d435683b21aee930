"""A command whose errors become an exit code and one paragraph."""

import functools
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from components.base.errors import TetherError, disk_error
from components.base.text import plain
from components.training.stopping import Interrupted, graceful
from flows.environment import check_packages, prepare_environment, tether_home

INTERRUPTED = 130
"""By Ctrl-C; and by SIGTERM: as a shell says that a signal ended a command, 128 and its number."""
TERMINATED = 143


def echo(message: object, nl: bool = True, err: bool = False) -> None:
    """Print as `typer.echo` does; what could command the terminal is shown instead, whoever wrote it."""
    typer.echo(plain(str(message)), nl=nl, err=err)


def command(group: typer.Typer, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose errors become an exit code and one paragraph."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                with graceful():
                    check_packages()
                    prepare_environment(tether_home())
                    function(*args, **kwargs)
            except (Exception, KeyboardInterrupt) as error:
                _fail(error)

        return group.command(name)(guarded)

    return register


def _fail(error: BaseException) -> NoReturn:
    """Say what went wrong and exit with its code; only what nobody foresaw shows a stack trace."""
    if isinstance(error, typer.Exit):
        raise error
    if isinstance(error, KeyboardInterrupt):
        echo("tether: interrupted. The same command goes on from the last checkpoint.", err=True)
        raise typer.Exit(TERMINATED if isinstance(error, Interrupted) else INTERRUPTED) from None
    error = disk_error(error) or error
    if isinstance(error, TetherError):
        echo(f"tether: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(error.exit_code) from None
    echo("".join(traceback.format_exception(error)), nl=False, err=True)
    echo("tether: this is a mistake of Tether's, not yours; the lines above say where.", err=True)
    raise typer.Exit(1) from None
