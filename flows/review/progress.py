"""How far a batch is: for whoever waits for its labels."""

from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, func, select, true

from components.base.errors import UserError
from flows.review.database.connect import database_file, open_database
from flows.review.database.tables import batch, slot


class ReviewProgress(NamedTuple):
    """What is answered of a batch."""

    answered: int
    """Slots with an answer that counts."""
    slots: int
    """Answers asked for: items times overlap."""
    raters: int
    """People who have answered."""
    complete: bool
    address: str
    """Of the page as it was last served; it needs a personal link. Empty where it never was."""


def progress(url_or_path: str | Path, batch_name: str | None = None) -> ReviewProgress:
    """Return how far the batch is that a page's database holds.

    Args:
        url_or_path: a SQLite file or a URL.
        batch_name: a run's id; None takes the only batch.

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
    """Return how far the page of a run is, whose answers lie in the home; None where none was served."""
    file = database_file(home, run)
    return progress(file, run) if file.is_file() else None


def progress_of(connection: Connection, number: int) -> ReviewProgress:
    """Return how far the batch of that number is."""
    slots, answered = connection.execute(
        select(func.count(), func.count(slot.c.vote)).where(slot.c.batch == number)
    ).one()
    voted = select(func.count(func.distinct(slot.c.rater))).where(slot.c.batch == number, slot.c.vote.is_not(None))
    about = connection.execute(select(batch.c.address).where(batch.c.id == number)).one()
    return ReviewProgress(answered, slots, connection.scalar(voted) or 0, answered == slots, about.address)
