"""Connect to the page's database: SQLite in the home by default, PostgreSQL by URL."""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, inspect, make_url, select
from sqlalchemy.exc import ArgumentError, DBAPIError

from components.base.errors import UserError
from components.base.files import make_folder
from flows.review.database.tables import VERSION, metadata, review_version

FOLDER = "review"
"""The folder of a home that holds its batches' databases."""
_WRITES = {"writes": True}
_WAIT_S = 30


def database_file(home: Path, batch: str) -> Path:
    """Return the path of a batch's SQLite file, which is used if no URL is given."""
    return home / FOLDER / f"{re.sub(r'[^A-Za-z0-9._-]', '_', batch)}.db"


def open_database(place: str | Path, create: bool = True) -> Engine:
    """Return an engine for `place` (a SQLite file or a URL), with its tables, which are made if it is new.

    Use `writing(engine)` to write, and `engine.connect()` to read.

    Raises:
        UserError: the URL or file is invalid or missing, the database can't be reached, or its driver is not installed.
    """
    url = database_url(place)
    sqlite = url.startswith("sqlite")
    file = Path(make_url(url).database or "") if sqlite else None
    if file is not None and not create and not file.is_file():
        raise UserError(f"{file}: no page has been served from there. Start one with `tether people page`.")
    if file is not None:
        make_folder(file.parent)
    try:
        engine = create_engine(url, pool_pre_ping=not sqlite, connect_args={"timeout": _WAIT_S} if sqlite else {})
    except ModuleNotFoundError as error:
        raise UserError(
            f"{error.name} is not installed, which PostgreSQL needs: pip install 'tether[postgresql]'."
        ) from error
    if sqlite:
        event.listen(engine, "connect", _prepare_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
        event.listen(engine, "handle_error", _refuse_damage)
    try:
        _make_tables(engine)
        if file is not None:
            file.chmod(0o600)  # it holds people's names and answers
    except DBAPIError as error:
        engine.dispose()
        named = "" if file is None else f"{file}: "
        raise UserError(f"{named}the review page's database can't be used: {error.orig}. Check --database.") from error
    except BaseException:
        engine.dispose()
        raise
    return engine


@contextmanager
def writing(engine: Engine) -> Iterator[Connection]:
    """Run a transaction that writes, and commit it at the end.

    SQLite takes its write lock at the start, so that it can't lose the lock to another writer halfway.
    """
    with engine.execution_options(**_WRITES).begin() as connection:
        yield connection


def database_url(place: str | Path) -> str:
    """Return `place` as a SQLAlchemy URL; PostgreSQL uses the driver psycopg.

    Raises:
        UserError: the URL is invalid, or of another kind of database.
    """
    if isinstance(place, Path) or "://" not in place:
        return f"sqlite:///{Path(place).absolute()}"
    try:
        url = make_url(place)
    except ArgumentError as error:
        raise UserError("--database is not a URL. Give postgresql://USER@HOST/DATABASE, or a file.") from error
    kind = url.drivername.partition("+")[0]
    if kind in ("postgres", "postgresql"):
        return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    if kind == "sqlite":
        return url.render_as_string(hide_password=False)
    raise UserError(f"--database {kind}://: the page is stored in SQLite or PostgreSQL. Give one of these.")


def _prepare_sqlite(connection: sqlite3.Connection, record: Any) -> None:
    connection.isolation_level = None  # otherwise the driver starts its own transactions
    for setting in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={_WAIT_S * 1000}"):
        connection.execute(f"PRAGMA {setting}")


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _refuse_damage(context: ExceptionContext) -> None:
    """Raise UserError where SQLite finds its file damaged, whichever query finds it."""
    error = context.original_exception
    if context.engine is not None and (type(error) is sqlite3.DatabaseError or "decode to UTF-8" in str(error)):
        raise _damaged(context.engine, str(error)) from error


def _damaged(engine: Engine, why: str) -> UserError:
    return UserError(
        f"{engine.url.database}: the review page's database can't be used: {why}. Check --database, or restore it from "
        "a backup."
    )


def _make_tables(engine: Engine) -> None:
    """Make the tables of a new database; refuse a damaged one, and one with the tables of another version."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            damage = connection.exec_driver_sql("PRAGMA quick_check(1)").scalar()
            if damage != "ok":
                raise _damaged(engine, str(damage))
        present = _version(connection)
    if present is None:
        with writing(engine) as connection:
            if _version(connection) is None:  # no other process was first
                metadata.create_all(connection, checkfirst=False)  # refuses another program's table of the same name
                connection.execute(review_version.insert().values(version_num=VERSION))
    elif present != VERSION:
        raise UserError(
            f"a newer Tether wrote the review page's database (its tables are {present}, these {VERSION}). Use that "
            "version, or another database."
        )


def _version(connection: Connection) -> str | None:
    there = inspect(connection).has_table(review_version.name)
    return connection.scalar(select(review_version.c.version_num)) if there else None
