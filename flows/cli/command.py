"""Register commands so that an error becomes an exit code and one paragraph."""

import contextlib
import functools
import io
import locale
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, cast

import typer

from components.base.errors import Mistakes, TetherError, UserError, disk_error
from components.base.redaction import redacted
from components.base.text import plain
from components.training.stopping import Interrupted, drop_output, graceful
from flows.environment import check_packages, prepare_environment, tether_home

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
SIGNALLED = 128
"""Added to a signal's number to give the exit code, as shells do: 130 after Ctrl-C."""


def echo(message: object, nl: bool = True, err: bool = False) -> None:
    """Print as `typer.echo` does, with control characters made visible so that the terminal does not obey them.

    With JSON logs, a message for standard error becomes a log line.
    """
    if err and _logs_json():
        from tasks.execution import logs

        logs.logger.error("%s", str(message).strip())
        return
    with contextlib.suppress(*[OSError] * err):  # where nobody reads the message, the exit code still counts
        typer.echo(plain(str(message)), nl=nl, err=err)


def prepare_streams() -> None:
    """Open closed standard streams on /dev/null, where the next file would else take their place, and begin again in
    UTF-8 mode if the locale has another encoding: paths, texts and output then have any character."""
    closed = []
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            closed.append(os.open(os.devnull, os.O_RDWR))
            os.set_inheritable(number, True)
    if closed or (not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8"):
        os.environ["PYTHONUTF8"] = "1"
        with contextlib.suppress(OSError):
            os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def exit_code(call: Callable[[], object]) -> int:
    """Return the exit code of the command line `call`, whatever becomes of its output: 141 if its reader ended, 2 if
    its disk is full, unless the command itself failed."""
    code, lost = 0, cast(OSError | None, None)
    try:
        call()
    except SystemExit as ended:
        code = int(ended.code or 0)
        if isinstance(ended.__context__, BrokenPipeError):  # Typer and Rich make 1 of it
            code, lost = 0, ended.__context__
    except OSError as error:  # while printing help, a version or a mistyped option
        lost, code = error, getattr(error.__context__, "exit_code", 0)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError as error:
            lost = lost or (error if stream is sys.stdout else None)
            drop_output(stream)
    if isinstance(lost, BrokenPipeError) and not code:
        return SIGNALLED + signal.SIGPIPE
    if lost is not None and not code:
        echo(f"tether: what it prints can't be written ({lost.strerror}). Print to another place.", err=True)
        return UserError.exit_code
    return code


def _logs_json() -> bool:
    """Return whether log lines are JSON, after installing their handler. An unknown format raises nothing here."""
    if os.environ.get("TETHER_LOG_FORMAT") != "json":
        return False
    from tasks.execution import logs

    logs.install()
    return True


def command(
    group: typer.Typer, name: str, any_home: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a command whose errors become an exit code and one paragraph.

    The command refuses a home that a newer Tether wrote, unless `any_home` is set.
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
                fail(error)

        return group.command(name)(guarded)

    return register


def fail(error: BaseException) -> NoReturn:
    """Print what went wrong and exit with the error's code; only an unexpected error prints a stack trace."""
    if isinstance(error, typer.Exit):
        raise error
    if isinstance(error, BrokenPipeError) and error.filename is None:
        drop_output()
        raise typer.Exit(SIGNALLED + signal.SIGPIPE) from None  # as for any program whose reader is `head`
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

        logs.logger.critical("this is a bug in Tether, not a mistake of yours: %s", error, exc_info=error)
        raise typer.Exit(1) from None
    echo(redacted("".join(traceback.format_exception(error))), nl=False, err=True)
    echo("tether: this is a bug in Tether, not a mistake of yours; the lines above show where it happened.", err=True)
    raise typer.Exit(1) from None


def _paragraph(error: TetherError) -> str:
    lines = str(error).splitlines() if isinstance(error, Mistakes) else [str(error)]
    return "\n  ".join(" ".join(line.split()) for line in lines)
