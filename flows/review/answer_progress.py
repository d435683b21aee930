"""Count the answers to a batch in its page's database."""

from pathlib import Path

from sqlalchemy import Connection, func, select

from flows.review.database.connect import database_file, open_database
from flows.review.database.tables import batch, slot
from tasks.runs.awaited_labels import LabelProgress


def progress_of_run(home: Path, run: str, database: str | None = None) -> LabelProgress | None:
    """Return the progress of a run's page in `database` (None: that in the home); None if no page was served."""
    file = database_file(home, run)
    if database is None and not file.is_file():
        return None
    engine = open_database(database or file, create=False)
    try:
        with engine.connect() as connection:
            number = connection.scalar(select(batch.c.id).where(batch.c.name == run))
            return None if number is None else progress_of(connection, number)
    finally:
        engine.dispose()


def progress_of(connection: Connection, number: int) -> LabelProgress:
    """Return the progress of the batch `number`."""
    slots, answered = connection.execute(
        select(func.count(), func.count(slot.c.vote)).where(slot.c.batch == number)
    ).one()
    address = connection.scalar(select(batch.c.address).where(batch.c.id == number)) or ""
    return LabelProgress(answered, slots, address)
