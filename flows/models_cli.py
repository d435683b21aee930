"""`tether card`, `tether export`, `tether reproduce`: the commands on a finished model."""

from pathlib import Path
from typing import Annotated

import typer

from components.errors import UserError
from flows.commands import command
from flows.environment import tether_home

model_commands = typer.Typer()

DIFFERS = 3
"""Exit code where one code on one kind of machine gave other bytes."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A registered model (tether-policy@champion, tether-policy/3), RUN/STAGE, RUN (its policy), or a digest.",
    ),
]


@command(model_commands, "card")
def card(model: Model) -> None:
    """Print a model's card in the hub's format."""
    from flows.card import card as text
    from flows.model_facts import model_facts

    typer.echo(text(model_facts(tether_home(), model)), nl=False)


@command(model_commands, "export")
def export(
    model: Model,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new or empty folder.")],
    allow_failed: Annotated[bool, typer.Option("--allow-failed", help="Though its gates failed.")] = False,
) -> None:
    """Write a model as a Hugging Face folder with its card, for transformers, vLLM and the hub."""
    from flows.export import export as write

    facts = write(tether_home(), model, folder, allow_failed)
    typer.echo(f"{facts.name} ({facts.record.digest[:12]}) is in {folder}")
    for reason in facts.failures:
        typer.echo(f"  it failed: {reason}")


@command(model_commands, "reproduce")
def reproduce(
    of: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="As `tether export`; a run's id means all its stages.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="NAME=PATH", help="Where an input is now, as preferences=FILE."),
    ] = None,
    allow_other_code: Annotated[
        bool, typer.Option("--allow-other-code", help="Though the code here is not what computed it.")
    ] = False,
) -> None:
    """Compute a model or run again from its sources, apart from all that is stored, and compare digests and metrics."""
    from flows.reproduce import reproduce as again
    from flows.reproduce_text import text

    found = again(tether_home(), of, dict(_named_path(each) for each in data or []), allow_other_code)
    typer.echo("\n".join(text(found)))
    if not found.same and not found.explained:
        raise typer.Exit(DIFFERS)


def _named_path(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    if not (name and equals and path):
        raise UserError(f"--data {given}: give NAME=PATH, as --data preferences=pairs.jsonl.")
    return name, Path(path).expanduser()
