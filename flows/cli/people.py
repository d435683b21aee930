"""`tether people`: what people judge, on a page or in files, and how far they are. The commands `score` and `compare`,
which continue or start a run, are in `__main__`.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.base.errors import UserError
from components.base.paths import user_text
from components.base.text import counted
from flows.cli import completion
from flows.cli.command import Json, command, echo
from flows.cli.replaced import Commands
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.review.personal_links import PersonalLink
    from flows.review.rater_votes import Voting
    from flows.review.review_batches import BatchSource
    from tasks.runs.awaited_labels import LabelProgress

people = typer.Typer(cls=Commands, help="Let people judge, and score their labels.", no_args_is_help=True)

Batch = Annotated[
    str,
    typer.Argument(
        metavar="BATCH", autocompletion=completion.runs,
        help="A run that awaits labels, or a folder or file of pairs (pairs.jsonl, review.jsonl).",
    ),
]  # fmt: skip
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="TETHER_REVIEW_DATABASE", help="PostgreSQL, or a SQLite file (default: in the home)."
    ),
]


@command(people, "power")
def power(
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
    """Print the smallest win rate that a sample can detect."""
    from flows.reports.plan import SamplePlan, findable

    power_table = findable(SamplePlan(items, raters, raters if per_item is None else per_item, ties, rater_spread))
    echo(power_table.as_json() if as_json else power_table.text())


@command(people, "page")
def page(
    batch: Batch,
    rater: Annotated[
        list[str] | None, typer.Option("--rater", metavar="NAME", help="Let this person judge, and print their link.")
    ] = None,
    renew: Annotated[
        list[str] | None,
        typer.Option(
            "--renew", metavar="NAME", help="Make a new link for a rater or `administrator`; the old one stops working."
        ),
    ] = None,
    links: Annotated[
        bool, typer.Option("--links", help="Only print new links, or the raters if there is none; serve nothing.")
    ] = False,
    overlap: Annotated[
        int | None,
        typer.Option(min=1, max=999, help="Answers per item, from different people (default: the sheet's raters)."),
    ] = None,
    guidelines: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Guidelines to show instead of the batch's own.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 is the whole network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 9430,
    address: Annotated[
        str,
        typer.Option(
            metavar="URL", help="The page's address for raters, such as https://review.example.org behind a proxy."
        ),
    ] = "",
    database: Database = None,
) -> None:  # long: an argument for each option
    """Serve a page on which people judge, until Ctrl-C.

    Answers are kept: the same command continues. After the last one the run is scored (`human_eval.when_complete`).
    Each personal link is printed only once, because only its hash is stored."""
    from flows.people.label_progress import show_progress, when_complete
    from flows.review.answer_progress import progress_of
    from flows.review.personal_links import add_raters, raters_of, renew_link
    from flows.review.serve import after_completion, serve

    text = None if guidelines is None else user_text(str(guidelines), "--guidelines")
    with _opened(batch, database, overlap, text) as (voting, source, admin):
        engine, number = voting.engine, voting.batch.id
        earlier = {name for _, name in raters_of(engine, number)}
        made = [*([admin] if admin is not None else [])]
        made += add_raters(engine, number, [name for name in dict.fromkeys(rater or []) if name not in earlier])
        made += [renew_link(engine, number, name) for name in renew or []]
        raters = raters_of(engine, number)
        if links:
            with engine.connect() as connection:
                served = progress_of(connection, number).address
            _print_links(made, address or served or f"http://{host}:{port}")
            if not made:
                echo("\n".join(f"{n:3}  {name}" for n, name in raters) or "No raters yet: --rater NAME.")
            return

        def ready(at: str) -> None:
            items, answers = counted(len(source.pairs), "pair"), counted(source.overlap, "answer")
            echo(f"{source.name}: {items}, {answers} each, at {at}")
            _print_links(made, at)
            if len(raters) < source.overlap:
                echo(
                    f"There are too few raters ({len(raters)}) for {answers} of each item. Add some: "
                    f"tether people page {batch} --links --rater NAME"
                )

        home, of_run = tether_home(), source.kind == "sample"

        def follow(name: str, files: Path) -> str:
            return when_complete(home, name, files, echo)

        def show(progress: "LabelProgress") -> None:
            show_progress(home, source.name, progress, echo)

        done = after_completion(voting, source, follow if of_run else None, echo)
        serve(voting, host, port, address, done, ready, show if of_run else None)


@command(people, "tasks")
def tasks(
    batch: Batch,
    file: Annotated[Path, typer.Argument(help="The file to write (.json).")],
) -> None:
    """Write a batch as Label Studio's tasks.

    Give its export to `score`, or for pairs to `answers --from`."""
    from flows.people.tools import write_tasks
    from flows.review.review_batches import find_batch

    if file.suffix != ".json":  # a run's folder has sheet.csv; an .xml or .html would be overwritten
        raise UserError(f"{file}: Label Studio's tasks are JSON. Name a file that ends in .json.")
    source = find_batch(tether_home(), batch)
    echo(f"{counted(len(source.pairs), 'item')}: {', '.join(map(str, write_tasks(source, file)))}")


@command(people, "answers")
def answers(
    batch: Batch,
    export: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Label Studio's export of pairs (JSON)."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write to this folder (default: the run's raters/, or beside the pairs)."),
    ] = None,
    database: Database = None,
) -> None:
    """Write people's answers so far as files.

    For a run, one file per rater; for pairs, votes that data.preferences reads. The answers are those on the page, or
    those of an export of Label Studio."""
    from flows.people.tools import read_votes
    from flows.review.answer_export import export as write
    from flows.review.answer_export import write_votes
    from flows.review.review_batches import find_batch

    if export is not None:
        source = find_batch(tether_home(), batch)
        votes = read_votes(source, export)
        written = write_votes(source, votes, out)
        echo(f"{counted(sum(map(bool, votes.values())), 'pair')} with votes: {written}")
        return
    with _opened(batch, database, create=False) as (voting, source, _):
        echo("\n".join(map(str, write(voting, source, out))))


@command(people, "status")
def status(
    batch: Annotated[
        str | None,
        typer.Argument(metavar="BATCH", help="A run that awaits labels (default: the newest), or a folder of pairs."),
    ] = None,
    sheets: Annotated[
        list[Path] | None,
        typer.Option("--sheet", metavar="PATH", help="A rater's file, or a folder (default: the run's own raters/)."),
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            "--watch", metavar="SECONDS", min=1, help="Check this often until all labels are in, then score."
        ),
    ] = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Count the labels so far, by rater.

    Where people judge on a page, it also shows their agreement and habits, and a bound on the win rate that stays valid
    no matter how often you look. The bound needs the key, which the page does not have: run this where the home is.
    Prefect and MLflow show the counts too, unless --sheet names other files."""
    from components.human_eval.sheet import RATERS
    from flows.people.label_progress import labels_progress, show_progress, when_complete
    from flows.review.answer_progress import progress_of_run
    from tasks.runs.status import has_run, load_status

    home = tether_home()
    if batch is not None and Path(batch).exists() and not has_run(home, batch):
        if sheets or every is not None:
            raise UserError(f"status {batch}: --sheet and --watch are for a run, and these are pairs. Leave them out.")
        _print_status(batch, None, batch, database, as_json)
        return
    name = load_status(home, batch).run
    while True:
        progress = labels_progress(home, name, sheets, database)
        if not sheets:  # files that others do not have
            show_progress(home, name, progress, echo)
        if every is None or progress.complete:
            break
        time.sleep(every)
    served = name if progress_of_run(home, name, database) is not None else None
    _print_status(f"Run {name}", progress, served, database, as_json)
    folder = sheets[0] if sheets and len(sheets) == 1 else home / "runs" / name / RATERS
    if progress.complete and every is not None:
        echo(when_complete(home, name, folder, echo))
    elif progress.complete and not as_json:
        echo(f"All labels are in. Score them: tether people score {folder} --run {name}")


def _print_status(
    title: str, labels: "LabelProgress | None", batch: str | None, database: str | None, as_json: bool
) -> None:
    """Print how many labels are in (None: as many as the page has), and what the page of `batch` knows, if any."""
    page: dict[str, Any] | None = None
    lines: list[str] = []
    if batch is not None:
        from flows.review.batch_summary import summary
        from flows.review.review_batches import sample_folder
        from flows.review.review_status import as_record, as_text, early_bound

        with _opened(batch, database, create=False) as (voting, source, _):
            counts, bound = summary(voting), None
            if source.kind == "sample":
                folder = sample_folder(tether_home(), source.name)
                bound = early_bound(voting.engine, voting.batch.id, folder, source.overlap)
        labels, page, lines = labels or counts.progress, as_record(counts, bound), [as_text(counts, bound)]
    assert labels is not None
    if as_json:
        more = {"raters": dict(labels.raters), "share": labels.share, "complete": labels.complete, "page": page}
        echo(json.dumps(labels.as_json() | more))
        return
    raters = [f"  {rater}: {answered} of {total}" for rater, (answered, total) in labels.raters.items()]
    echo("\n".join([f"{title}: {labels.text}", *raters, *lines]))


def show_comparison(folder: Path) -> None:
    """Print the result of a comparison of models, if the run in `folder` is a comparison that has been scored."""
    from flows.launch.run_computing import COMPARISON

    if (folder / COMPARISON).is_file():
        echo((folder / COMPARISON).read_text(encoding="utf-8"))


def _print_links(links: "list[PersonalLink]", address: str) -> None:
    """Print links. They are not stored anywhere."""
    if not links:
        return
    echo("Personal links, printed this once. Give each person theirs, and nobody else:")
    for link in links:
        echo(f"  {link.name}: {link.url(address)}")


@contextmanager
def _opened(
    named: str, database: str | None, overlap: int | None = None, guidelines: str | None = None, create: bool = True
) -> "Iterator[tuple[Voting, BatchSource, PersonalLink | None]]":
    """Open the batch in its database, which must have it unless `create` is set. Also yields the administrator's link
    if the batch is new."""
    from flows.review.database.connect import database_file, open_database
    from flows.review.personal_links import enter_batch
    from flows.review.rater_votes import Voting
    from flows.review.review_batches import find_batch

    source = find_batch(tether_home(), named, overlap, guidelines)
    engine = open_database(database or database_file(tether_home(), source.name), create)
    try:
        number, admin = enter_batch(engine, source, check_overlap=overlap is not None, create=create)
        voting = Voting.open(engine, number)
        yield voting, source._replace(overlap=voting.batch.overlap), admin
    finally:
        engine.dispose()
