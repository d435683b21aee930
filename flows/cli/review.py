"""`tether review`: a page on which people judge pairs, its personal links, and its results."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from components.base.text import counted
from flows.cli.command import Json, command, echo
from flows.cli.replaced import Commands
from flows.environment import tether_home

if TYPE_CHECKING:
    from flows.review.batches import BatchSource
    from flows.review.links import PersonalLink
    from flows.review.progress import ReviewProgress
    from flows.review.votes import Voting

review = typer.Typer(cls=Commands, help="A page on which people judge pairs.", no_args_is_help=True)

Batch = Annotated[
    str,
    typer.Argument(
        metavar="BATCH", help="A run that awaits labels, or a folder or file of pairs (pairs.jsonl, review.jsonl)."
    ),
]
Overlap = Annotated[
    int | None,
    typer.Option(min=1, max=999, help="Answers per item, from different people (default: the sheet's raters)."),
]
Database = Annotated[
    str | None,
    typer.Option(
        metavar="URL", envvar="TETHER_REVIEW_DATABASE", help="PostgreSQL, or a SQLite file (default: in the home)."
    ),
]


@command(review, "serve")
def serve(
    batch: Batch,
    rater: Annotated[
        list[str] | None, typer.Option("--rater", metavar="NAME", help="Let this person judge, and print their link.")
    ] = None,
    overlap: Overlap = None,
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
) -> None:
    """Serve the page until Ctrl-C. Answers are kept: the same command continues.

    After the last answer the run is scored (`human_eval.when_complete`)."""
    from flows.people.progress import of_page, show_progress, when_complete
    from flows.review.links import add_raters, raters_of
    from flows.review.serve import after_completion, read_guidelines
    from flows.review.serve import serve as serve_page

    text = read_guidelines(guidelines)
    with _opened(batch, database, overlap, text) as (voting, source, admin):
        known = {name for _, name in raters_of(voting.engine, voting.batch.id)}
        fresh = [name for name in dict.fromkeys(rater or []) if name not in known]
        links = [*([admin] if admin is not None else []), *add_raters(voting.engine, voting.batch.id, fresh)]

        def ready(at: str) -> None:
            echo(
                f"{source.name}: {counted(len(source.pairs), 'pair')}, {counted(source.overlap, 'answer')} each, at "
                f"{at}"
            )
            _print_links(links, at)
            if (people := len(raters_of(voting.engine, voting.batch.id))) < source.overlap:
                echo(
                    f"There are too few raters ({people}) for {counted(source.overlap, 'answer')} of "
                    "each item. Add some: "
                    f"tether review links {batch} --add NAME"
                )

        home, of_run = tether_home(), source.kind == "sample"

        def follow(name: str, files: Path) -> str:
            return when_complete(home, name, files, echo)

        def show(found: "ReviewProgress") -> None:
            show_progress(home, source.name, of_page(found), echo)

        done = after_completion(voting, source, follow if of_run else None, echo)
        serve_page(voting, host, port, address, done, ready, show if of_run else None)


@command(review, "links")
def links(
    batch: Batch,
    add: Annotated[list[str] | None, typer.Option("--add", metavar="NAME", help="Let this person judge.")] = None,
    renew: Annotated[
        list[str] | None,
        typer.Option(
            "--renew", metavar="NAME", help="Make a new link for a rater or `administrator`; the old one stops working."
        ),
    ] = None,
    address: Annotated[str, typer.Option(metavar="URL", help="The page's address for raters.")] = "",
    overlap: Overlap = None,
    database: Database = None,
) -> None:
    """Print personal links, or list the raters.

    Each link is printed only once, because only its hash is stored. Without options, list the raters.
    """
    from flows.review.links import add_raters, address_of, raters_of, renew_link

    with _opened(batch, database, overlap) as (voting, _, admin):
        at = address or address_of(voting.engine, voting.batch.id) or "http://127.0.0.1:9430"
        made = [*([admin] if admin is not None else []), *add_raters(voting.engine, voting.batch.id, add or [])]
        made += [renew_link(voting.engine, voting.batch.id, name) for name in renew or []]
        _print_links(made, at)
        if not made:
            people = raters_of(voting.engine, voting.batch.id)
            echo("\n".join(f"{number:3}  {name}" for number, name in people) or "No raters yet: --add NAME.")


@command(review, "export")
def export(
    batch: Batch,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write to this folder (default: the run's raters/, or beside the pairs)."),
    ] = None,
    overlap: Overlap = None,
    database: Database = None,
) -> None:
    """Write the answers so far as files.

    For a run, one file per rater; for candidates, votes that data.preferences reads."""
    from flows.review.export import export as write

    with _opened(batch, database, overlap, create=False) as (voting, source, _):
        echo("\n".join(map(str, write(voting, source, out))))


@command(review, "status")
def status(batch: Batch, overlap: Overlap = None, database: Database = None, as_json: Json = False) -> None:
    """Show progress, agreement, raters and a bound on the win rate.

    The bound stays valid no matter how often you look. It needs the key, which the page does not have: run this where
    the home is, not where raters are."""
    from flows.review.batches import sample_folder
    from flows.review.bound import early_bound
    from flows.review.status import as_record, as_text
    from flows.review.summary import summary

    with _opened(batch, database, overlap, create=False) as (voting, source, _):
        found, bound = summary(voting), None
        if source.kind == "sample":
            folder = sample_folder(tether_home(), source.name)
            bound = early_bound(voting.engine, voting.batch.id, folder, source.overlap)
        echo(json.dumps(as_record(source.name, found, bound)) if as_json else as_text(source.name, found, bound))


def _print_links(links: "list[PersonalLink]", address: str) -> None:
    """Print links. They are not stored anywhere."""
    if not links:
        return
    echo("Personal links, printed this once. Give each person theirs, and nobody else:")
    for link in links:
        echo(f"  {link.name}: {link.url(address)}")


@contextmanager
def _opened(
    named: str, database: str | None, overlap: int | None, guidelines: str | None = None, create: bool = True
) -> "Iterator[tuple[Voting, BatchSource, PersonalLink | None]]":
    """Open the batch in its database. Also yields the administrator's link if the batch is new."""
    from flows.review.batches import find_batch
    from flows.review.database.connect import database_file, open_database
    from flows.review.links import enter_batch
    from flows.review.votes import Voting

    source = find_batch(tether_home(), named, overlap, guidelines)
    engine = open_database(database or database_file(tether_home(), source.name), create)
    try:
        number, admin = enter_batch(engine, source, asked=overlap is not None)
        voting = Voting.open(engine, number)
        yield voting, source._replace(overlap=voting.batch.overlap), admin
    finally:
        engine.dispose()
