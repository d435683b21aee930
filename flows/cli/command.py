"""A command whose errors become an exit code and one paragraph."""

import functools
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import typer

from components.base.errors import TetherError, disk_error, printable
from components.training.stopping import Interrupted, graceful
from flows.environment import check_packages, prepare_environment, tether_home

INTERRUPTED = 130
"""By Ctrl-C; and by SIGTERM: as a shell says that a signal ended a command, 128 and its number."""
TERMINATED = 143


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
        typer.echo("tether: interrupted. The same command goes on from the last checkpoint.", err=True)
        raise typer.Exit(TERMINATED if isinstance(error, Interrupted) else INTERRUPTED) from None
    error = disk_error(error) or error
    if isinstance(error, TetherError):
        typer.echo(f"tether: {printable(' '.join(str(error).split()))}", err=True)
        raise typer.Exit(error.exit_code) from None
    traceback.print_exception(error)
    typer.echo("tether: this is a mistake of Tether's, not yours; the lines above say where.", err=True)
    raise typer.Exit(1) from None
