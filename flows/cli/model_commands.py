"""`tether export`, `eval`, `reproduce` and `promote`: commands on a finished model."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from components.base.errors import UserError
from components.base.paths import user_path
from flows.cli.command import Json, command, echo
from flows.environment import tether_home

model_commands = typer.Typer()

DIFFERS = 3
"""Exit code if the same code on the same kind of machine gave different bytes."""

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A registered model (tether-policy@champion, tether-policy/3), RUN/STAGE (a judge is RUN/reward.judge), "
        "RUN (its policy), or a digest.",
    ),
]
Version = Annotated[
    str, typer.Argument(metavar="MODEL", help="A registered version: tether-policy/3 or tether-policy@candidate.")
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="The reason; recorded with your name.")]


@command(model_commands, "export")
def export(
    model: Model,
    folder: Annotated[Path | None, typer.Argument(metavar="FOLDER", help="A new or empty folder.")] = None,
    card: Annotated[bool, typer.Option("--card", help="Only print the card, in the hub's format.")] = False,
    allow_failed: Annotated[bool, typer.Option("--allow-failed", help="Export it even if its gates failed.")] = False,
) -> None:
    """Write a model and its card as a Hugging Face folder.

    transformers, vLLM and the hub can load it."""
    if card == (folder is not None):
        raise UserError(f"export {model}: give a folder for the model, or --card to print its card alone.")
    if folder is None:
        from flows.models.card import card as text
        from flows.models.model_facts import model_facts

        echo(text(model_facts(tether_home(), model)), nl=False)
        return
    from flows.models.model_export import export as write

    facts = write(tether_home(), model, folder, allow_failed)
    echo(f"{facts.name} ({facts.record.digest[:12]}) is in {folder}")
    for reason in facts.failures:
        echo(f"  it failed: {reason}")


@command(model_commands, "eval")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model: RUN:STAGE, RUN, a registered one (tether-policy@champion, tether-reward@candidate), a "
            "folder; or a sequence classifier of the hub (org/name@revision).",
        ),
    ],
    suite: Annotated[Path | None, typer.Option(metavar="FILE", help="For a reward model: judged pairs.")] = None,
    tasks: Annotated[list[str] | None, typer.Option(metavar="NAME|YAML", help="A harness' task; repeatable.")] = None,
    probes: Annotated[list[str] | None, typer.Option(metavar="NAME|FILE", help="A probe; repeatable.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="The first documents of each task.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option, repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a model: on judged pairs, or on tasks and probes.

    Of a reward model it reports accuracy, calibration and length by subset; of a language model scores and violations.
    Intervals are clustered."""
    if (suite is None) == (not tasks and not probes) or (suite is not None and (limit is not None or set_)):
        raise UserError(
            f"eval {model}: give --suite FILE alone for a reward model, or --tasks or --probes for a language model."
        )
    from flows.models import model_evaluation, suite_evaluation

    if suite is not None:
        result = suite_evaluation.evaluate(tether_home(), model, suite)
        echo(json.dumps(result) if as_json else suite_evaluation.text(result))
        return
    from rich.console import Console

    from flows.cli.config import overrides_of
    from flows.config.profiles import Override
    from tasks.execution.stage_progress import StageProgress

    named: dict[str, Any] = {"tasks": tasks or [], "probes": probes or []} | ({"limit": limit} if limit else {})
    options = [*overrides_of(set_), *(Override(("evaluation", name), value) for name, value in named.items())]
    with StageProgress(Console(stderr=True), "eval") as progress:
        result = model_evaluation.evaluate(
            tether_home(), model, options,
            lambda step, metrics, total=None, **_: progress.show({"step": step, "metrics": {}, "total": total}),
        )  # fmt: skip
    echo(json.dumps(result) if as_json else model_evaluation.text(result))


@command(model_commands, "reproduce")
def reproduce(
    of: Annotated[
        str, typer.Argument(metavar="MODEL|RUN", help="As for `tether export`; a run's id means all its stages.")
    ],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="NAME=PATH",
            help="Where an input is now: preferences=FILE; repeat it for several.",
        ),
    ] = None,
    allow_other_code: Annotated[
        bool, typer.Option("--allow-other-code", help="Recompute even if the code has changed since.")
    ] = False,
) -> None:
    """Recompute a model or run from its sources and compare.

    It uses no stored result, and compares digests and metrics."""
    from flows.models.reproduce import reproduce as again
    from flows.models.reproduce_text import text

    reproduction = again(tether_home(), of, [_named_path(path) for path in data or []], allow_other_code)
    echo("\n".join(text(reproduction)))
    if not reproduction.explained:
        raise typer.Exit(DIFFERS)


@command(model_commands, "promote")
def promote(
    model: Version,
    reason: Reason = "",
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove every alias instead; no run sets one again. Needs --reason.")
    ] = False,
) -> None:
    """Make a policy that passed human evaluation the champion.

    The former champion keeps its history."""
    from flows.models.alias_changes import demoted, promoted
    from tasks.runs.journal import current_user

    if remove and not reason.strip():
        raise UserError(f"promote {model} --remove: give the reason with --reason TEXT.")
    change = demoted if remove else promoted
    echo(change(tether_home(), model, current_user(), reason.strip() or "by hand"))


def _named_path(text: str) -> tuple[str, Path]:
    name, equals, path = text.partition("=")
    if not (name and equals and path):
        raise UserError(f"--data {text}: give NAME=PATH, for example --data preferences=pairs.jsonl.")
    return name, user_path(path, f"--data {name}")
