"""A command whose errors become an exit code and one paragraph."""

import functools
import os
import signal
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn

import typer

from components.base.errors import Mistakes, TetherError, disk_error
from components.base.redaction import redacted
from components.base.text import plain
from components.training.stopping import Interrupted, drop_output, graceful
from flows.environment import check_packages, prepare_environment, tether_home

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
SIGNALLED = 128
"""As a shell says that a signal ended a command: this and the signal's number, 130 of Ctrl-C."""


def echo(message: object, nl: bool = True, err: bool = False) -> None:
    """Print as `typer.echo` does, with control characters shown instead of sent to the terminal.

    What is for standard error is a log line where those are JSON.
    """
    if err and _logs_json():
        from tasks.execution import logs

        logs.logger.error("%s", str(message).strip())
        return
    typer.echo(plain(str(message)), nl=nl, err=err)


def _logs_json() -> bool:
    """Whether log lines are JSON, and ready to be written; nothing is raised for a format that there is not."""
    if os.environ.get("TETHER_LOG_FORMAT") != "json":
        return False
    from tasks.execution import logs

    logs.install()
    return True


def command(
    group: typer.Typer, name: str, any_home: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose errors become an exit code and one paragraph.

    It is refused for a home that a newer Tether wrote, unless it takes `any_home`.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> None:
            try:
                with graceful():
                    check_packages()
                    prepare_environment(tether_home())
                    if not any_home:
                        from tasks.runs.schema import check_home

                        check_home(tether_home())
                    function(*args, **kwargs)
            except (Exception, KeyboardInterrupt) as error:
                _fail(error)

        return group.command(name)(guarded)

    return register


def _fail(error: BaseException) -> NoReturn:
    """Say what went wrong and exit with its code; only what nobody foresaw shows a stack trace."""
    if isinstance(error, typer.Exit):
        raise error
    if isinstance(error, BrokenPipeError) and error.filename is None:
        drop_output()
        raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None  # as `head` ends whatever writes to it
    if isinstance(error, KeyboardInterrupt):
        why = f": {error}" if str(error) else ""
        echo(f"tether: interrupted{why}. Run the same command again to continue.", err=True)
        number = error.number if isinstance(error, Interrupted) else signal.SIGINT
        raise typer.Exit(SIGNALLED + number) from None
    error = disk_error(error) or error
    if isinstance(error, TetherError):
        echo(f"tether: {_paragraph(error)}", err=True)
        raise typer.Exit(error.exit_code) from None
    if _logs_json():
        from tasks.execution import logs

        logs.logger.critical("this is a mistake of Tether's, not yours: %s", error, exc_info=error)
        raise typer.Exit(1) from None
    echo(redacted("".join(traceback.format_exception(error))), nl=False, err=True)
    echo("tether: this is a mistake of Tether's, not yours; the lines above say where.", err=True)
    raise typer.Exit(1) from None


def _paragraph(error: TetherError) -> str:
    """An error's message as one paragraph; of several mistakes, a line each."""
    lines = str(error).splitlines() if isinstance(error, Mistakes) else [str(error)]
    return "\n  ".join(" ".join(line.split()) for line in lines)
