"""`tether human-eval`: what a sample can find. (`score`, which takes a run up, stands with the other runs.)"""

from pathlib import Path
from typing import Annotated

import typer

from flows.cli.command import Json, command, echo

human_eval = typer.Typer(help="People's labels.", no_args_is_help=True)


@command(human_eval, "plan")
def plan(
    items: Annotated[int, typer.Option(metavar="N", help="Items to judge.")],
    raters: Annotated[int, typer.Option(metavar="K", help="People who judge.")],
    per_item: Annotated[
        int | None, typer.Option(metavar="M", help="Ratings of each item (default: every rater's).")
    ] = None,
    ties: Annotated[float, typer.Option(metavar="SHARE", help="Expected share of ties.")] = 0.15,
    rater_spread: Annotated[
        float, typer.Option(metavar="SD", help="How far raters differ, on the logit: 0.3 is little, 1 is much.")
    ] = 0.3,
    as_json: Json = False,
) -> None:
    """Say which win rate so many items and raters can find."""
    from flows.reports.plan import SamplePlan, findable

    found = findable(SamplePlan(items, raters, raters if per_item is None else per_item, ties, rater_spread))
    echo(found.as_json() if as_json else found.text())


def show_comparison(folder: Path) -> None:
    """Print what came of a comparison of models, where the run (its folder) is one that has been scored."""
    from flows.launch import COMPARISON

    if (folder / COMPARISON).is_file():
        echo((folder / COMPARISON).read_text(encoding="utf-8"))
