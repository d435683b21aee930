"""`tether human-eval`: plan a sample, exchange batches with other tools, and count labels. The commands `score` and
`compare`, which continue or start a run, are in `__main__`.
"""

import json
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from components.base.text import counted
from flows.cli import completion
from flows.cli.command import Json, command, echo
from flows.cli.replaced import Commands
from flows.environment import tether_home

human_eval = typer.Typer(cls=Commands, help="Collect and score people's labels.", no_args_is_help=True)


@command(human_eval, "plan")
def plan(
    items: Annotated[int, typer.Option(metavar="N", help="Number of items to judge.")],
    raters: Annotated[int, typer.Option(metavar="K", help="Number of people who judge.")],
    per_item: Annotated[
        int | None, typer.Option(metavar="M", help="Ratings of each item (default: one by every rater).")
    ] = None,
    ties: Annotated[float, typer.Option(metavar="SHARE", help="Expected share of ties.")] = 0.15,
    rater_spread: Annotated[
        float, typer.Option(metavar="SD", help="How much raters differ, on the logit: 0.3 is little, 1 is much.")
    ] = 0.3,
    as_json: Json = False,
) -> None:
    """Print the smallest win rate that a plan can detect."""
    from flows.reports.plan import SamplePlan, findable

    found = findable(SamplePlan(items, raters, raters if per_item is None else per_item, ties, rater_spread))
    echo(found.as_json() if as_json else found.text())


class Tool(StrEnum):
    """A format in which a batch is exported."""

    LABEL_STUDIO = "label-studio"
    CSV = "csv"
    JSONL = "jsonl"


@command(human_eval, "export")
def export(
    batch: Annotated[
        str,
        typer.Argument(metavar="RUN", help="A run that people judge, or a folder of candidates.",
                       autocompletion=completion.runs),
    ],
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    to: Annotated[Tool, typer.Option("--to", help="The tool that will read the file.")] = Tool.LABEL_STUDIO,
) -> None:  # fmt: skip
    """Write a batch for another tool. Give its results to `score`, or for candidates to `import`."""
    from flows.launch.labels import sample_of
    from flows.people.tools import export as write

    folder = Path(batch)
    found = write(folder if folder.is_dir() else sample_of(tether_home(), batch), to.value, file)
    echo(f"{counted(found.items, 'item')} for {to.value}: {', '.join(map(str, found.files))}")


@command(human_eval, "import")
def import_(
    candidates: Annotated[Path, typer.Argument(help="The folder of candidates that was exported.")],
    file: Annotated[Path, typer.Argument(help="Label Studio's export: JSON, JSON_MIN or CSV.")],
    out: Annotated[Path, typer.Argument(help="The file of votes to write, for data.preferences (.jsonl).")],
) -> None:
    """Turn Label Studio's votes on candidates into preferences."""
    from flows.people.tools import import_votes

    echo(f"{counted(import_votes(candidates, file, out), 'pair')} with votes: {out}")


@command(human_eval, "status")
def status(
    run: Annotated[
        str | None,
        typer.Argument(metavar="RUN", help="The run that awaits labels (default: the newest)."),
    ] = None,
    sheets: Annotated[
        list[Path] | None,
        typer.Option("--sheet", metavar="PATH", help="A rater's file, or a folder (default: the run's own raters/)."),
    ] = None,
    watch: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="Check this often until all labels are in, then score."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Count the labels so far, by rater.

    Prefect and MLflow show the counts too, unless --sheet names other files."""
    from components.human_eval.sheet import RATERS
    from flows.environment import tether_home
    from flows.people.progress import labels_progress, show_progress, when_complete
    from tasks.runs.status import load_status

    home = tether_home()
    name = load_status(home, run).run
    while True:
        found = labels_progress(home, name, sheets)
        if not sheets:  # files that others do not have
            show_progress(home, name, found, echo)
        if watch is None or found.complete:
            break
        time.sleep(watch)
    if as_json:
        more = {"raters": dict(found.raters), "share": found.share, "complete": found.complete}
        echo(json.dumps(found._asdict() | more))
    else:
        echo(f"Run {name}: {found.text}")
        for rater, (answered, asked) in found.raters.items():
            echo(f"  {rater}: {answered} of {asked}")
    folder = sheets[0] if sheets and len(sheets) == 1 else home / "runs" / name / RATERS
    if found.complete and watch is not None:
        echo(when_complete(home, name, folder, echo))
    elif found.complete:
        echo(f"All labels are in. Score them: tether human-eval score {folder} --run {name}")


def show_comparison(folder: Path) -> None:
    """Print the result of a comparison of models, if the run in `folder` is a comparison that has been scored."""
    from flows.launch.computing import COMPARISON

    if (folder / COMPARISON).is_file():
        echo((folder / COMPARISON).read_text(encoding="utf-8"))
