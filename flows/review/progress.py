"""Report the progress of a batch to those who wait for its labels."""

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, func, select, true

from components.base.errors import UserError
from flows.review.database.connect import database_file, open_database
from flows.review.database.tables import batch, slot


class ReviewProgress(NamedTuple):
    """How much of a batch is answered."""

    answered: int
    """Number of slots with an answer that counts."""
    slots: int
    """Number of answers asked for: items times overlap."""
    raters: int
    """Number of people who have answered."""
    complete: bool
    address: str
    """Address of the page when it was last served, for which a personal link is needed; empty if it never was."""


def progress(url_or_path: str | Path, batch_name: str | None = None) -> ReviewProgress:
    """Return the progress of the batch in a page's database.

    Args:
        url_or_path: a SQLite file or a URL.
        batch_name: a run's id; None means the only batch.

    Raises:
        UserError: there is no such database or batch, or there are several batches and none is named.
    """
    engine = open_database(url_or_path, create=False)
    try:
        with engine.connect() as connection:
            wanted = select(batch.c.id).where(batch.c.name == batch_name if batch_name is not None else true())
            found = connection.scalars(wanted).all()
            if len(found) != 1:
                which = f"no batch {batch_name}" if batch_name else f"{len(found)} batches, so name one"
                raise UserError(f"the review page's database holds {which}.")
            return progress_of(connection, found[0])
    finally:
        engine.dispose()


def progress_of_run(home: Path, run: str) -> ReviewProgress | None:
    """Return the progress of a run's page whose database is in the home; None if no page was served."""
    file = database_file(home, run)
    return progress(file, run) if file.is_file() else None


def progress_of(connection: Connection, number: int) -> ReviewProgress:
    """Return the progress of the batch `number`."""
    slots, answered = connection.execute(
        select(func.count(), func.count(slot.c.vote)).where(slot.c.batch == number)
    ).one()
    voted = select(func.count(func.distinct(slot.c.rater))).where(slot.c.batch == number, slot.c.vote.is_not(None))
    about = connection.execute(select(batch.c.address).where(batch.c.id == number)).one()
    return ReviewProgress(answered, slots, connection.scalar(voted) or 0, answered == slots, about.address)
