"""`tether stack`: run PostgreSQL, Prefect, MLflow, an S3 server, TLS and workers on this machine."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.errors import TetherError
from flows.cli.command import command, echo
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.stack.config import Stack

stack = typer.Typer(help="Run PostgreSQL, Prefect, MLflow, S3 and workers together.", no_args_is_help=True)

Config = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The stack's config (default: infra/stack.yaml).")
]


@command(stack, "up")
def up(config: Config = None) -> None:
    """Start all parts, and wait until every part answers.

    Parts that run already stay as they are.
    """
    from rich.console import Console

    from flows.stack.control import print_table
    from flows.stack.control import up as start
    from flows.stack.state import read_state

    path, here = load_config(config)
    print_table(Console(), here, start(here, path, echo), read_state(here))
    echo(
        f"\nRun this in each terminal that uses the stack:  . {here.exports}\n"
        f"Passwords are there and in {here.secrets}."
    )


@command(stack, "status", any_home=True)
def status(config: Config = None) -> None:
    """Check every part with its password, and report what is wrong."""
    from rich.console import Console

    from flows.stack.control import print_table, raise_refused
    from flows.stack.control import status as ask
    from flows.stack.state import runs

    _, here = load_config(config)
    answers, state = ask(here)
    if state is None:
        raise TetherError(f"No part of the stack in {here.folder} is running. `tether stack up` starts it.")
    print_table(Console(), here, answers, state)
    raise_refused(here, answers)
    if wrong := [each for each in answers if each.verdict != "ok"]:
        raise TetherError("; ".join(f"{each.part}: {each.told}" for each in wrong))
    if not runs(state.keeper):
        raise TetherError("The supervisor, which restarts parts, has ended. `tether stack up` starts it again.")


@command(stack, "down", any_home=True)
def down(config: Config = None) -> None:
    """Stop everything; databases, artifacts and passwords stay."""
    from flows.stack.control import down as end

    _, here = load_config(config)
    ended = end(here)
    told = f"Stopped {', '.join(ended)}." if ended else "The stack was not running."
    echo(f"{told} Its data stay in {here.folder}.")


@command(stack, "rotate", any_home=True)
def rotate(config: Config = None) -> None:
    """Replace every password. The stack must be down."""
    from flows.stack.prepare import rotate as change

    _, here = load_config(config)
    change(here)
    echo(
        f"New passwords are in {here.secrets} and {here.exports}; the old ones no longer work. `tether stack up` "
        "starts with "
        f"them. Copy {here.exports.name} to other machines again."
    )


@command(stack, "logs", any_home=True)
def logs(
    part: Annotated[str | None, typer.Argument(help="Only this part, for example mlflow (default: all).")] = None,
    lines: Annotated[int, typer.Option(metavar="N", min=0, help="Number of latest lines of each part.")] = 20,
    follow: Annotated[bool, typer.Option("--follow/--no-follow", help="Follow new lines until Ctrl-C.")] = True,
    config: Config = None,
) -> None:
    """Print the parts' latest log lines and follow new ones."""
    from flows.stack.logs import follow as tail

    with suppress(KeyboardInterrupt):
        tail(load_config(config)[1], part, lines, follow, echo)


def load_config(config: Path | None) -> "tuple[Path, Stack]":
    """Return the path of the config file, and the stack that it describes for this home."""
    from flows.stack.config import DEFAULT, load_stack

    path = config or DEFAULT
    return path, load_stack(path, tether_home())
