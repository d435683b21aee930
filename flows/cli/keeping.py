"""`tether backup`, `restore` and `upgrade`: keep a home across disasters and versions."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.text import counted
from flows.cli.command import command, echo
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.keeping.copying import Steps

keeping_commands = typer.Typer()

DUE = 1
"""Exit code of `tether upgrade --check` if an upgrade is due."""


@command(keeping_commands, "backup")
def backup(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder outside the home.")],
) -> None:
    """Copy home, store and servers into a folder.

    Runs may continue meanwhile."""
    from rich.filesize import decimal

    from components.base.paths import user_path
    from flows.keeping.backup import LEFT_OUT, back_up
    from flows.keeping.server_backup import named_servers, servers_elsewhere

    home = tether_home()
    done = back_up(home, user_path(str(folder), "backup"), _steps(), echo)
    files = done.manifest.files
    echo(
        f"Copied {counted(len(files), 'file')} ({decimal(done.bytes)}) of {home} into {done.folder}. Restore them with "
        "`tether restore`."
    )
    echo(f"Left out: {', '.join(f'{name} ({what})' for name, what in LEFT_OUT.items())}.")
    for text in servers_elsewhere(named_servers()):
        echo(text)


@command(keeping_commands, "restore")
def restore(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that `tether backup` wrote.")],
) -> None:
    """Restore home, store and servers from a backup.

    Everything is verified before anything is changed."""
    from components.base.paths import user_path
    from flows.keeping.restore import restore as make

    home = tether_home()
    done = make(user_path(str(folder), "restore").absolute(), home, _steps(), echo)
    echo(f"{home} is as it was on {done.created} ({done.host}).")


@command(keeping_commands, "upgrade")
def upgrade(
    check: Annotated[bool, typer.Option("--check", help="Only check; exit code 1 if an upgrade is due.")] = False,
) -> None:
    """Bring an older home up to date: MLflow's tables."""
    from flows.keeping.upgrade import due
    from flows.keeping.upgrade import upgrade as migrate

    home = tether_home()
    lines = due(home) if check else migrate(home)
    for text in lines:
        echo(text)
    if not lines:
        echo(f"{home} is up to date.")
    elif check:
        echo("An upgrade is due. Back up first (`tether backup DIR`), then run `tether upgrade`.")
        raise typer.Exit(DUE)
    else:
        echo(f"{home} is up to date now. Earlier versions of Tether may be unable to read it.")


def _steps() -> "Steps":
    from flows.keeping.copying import Steps
    from tasks.execution.stage_progress import Output

    return Steps(Output())
