"""MLflow's SQLite file: check whether its tables are outdated, upgrade them, and move artifact locations.

MLflow's server and client refuse tables of an earlier version. Only a new file gets its tables automatically.
"""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from components.base.files import replacing, sweep_drafts
from tasks.tracking.mlflow_client import load_mlflow

_PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)
"""Tables and columns in which MLflow stores artifact locations."""


def copy_database(source: Path, target: Path) -> None:
    """Copy a SQLite file in a consistent state while others write to it (SQLite's backup API).

    It is copied in one step, and writers wait. In several steps, each write of another process would restart the copy.
    """
    with closing(_opened(source)) as here, closing(sqlite3.connect(target)) as there:
        here.backup(there, pages=-1)
        there.execute("pragma journal_mode = delete")  # otherwise the copy would consist of two files


def is_outdated(path: Path) -> bool:
    """Return whether the installed MLflow is newer than the one that made the tables."""
    load_mlflow()
    from mlflow.store.db import utils

    engine = _engine(path)
    try:
        return bool(utils._get_schema_version(engine) != utils._get_latest_schema_revision())
    finally:
        engine.dispose()


def upgrade_database(path: Path) -> None:
    """Upgrade the file's tables to the installed MLflow, as `mlflow db upgrade` does, completely or not at all.

    Nobody else may write to it. MLflow's own command changes the file in many transactions, and can't continue if it is
    killed between two.
    """
    load_mlflow()
    from mlflow.store.db import utils

    sweep_drafts(path)
    with replacing(path) as temporary:
        copy_database(path, temporary)
        engine = _engine(temporary)
        try:
            utils._upgrade_db(engine)
        finally:
            engine.dispose()


def move_artifacts(path: Path, before: Path, after: Path) -> None:
    """Replace `before` by `after` at the start of the file's artifact locations, as paths and as file URLs."""
    pairs = ((f"{before}/", f"{after}/"), (f"{before.as_uri()}/", f"{after.as_uri()}/"))
    with closing(_opened(path)) as database, database:
        there = {
            (table, column)
            for table, _ in _PLACES
            for _, column, *_ in database.execute(f"pragma table_info({table})")
        }  # fmt: skip
        for table, column in (place for place in _PLACES if place in there):
            for old, new in pairs:
                change = f"update {table} set {column} = ? || substr({column}, ?) where substr({column}, 1, ?) = ?"
                database.execute(change, (new, len(old) + 1, len(old), old))


def _opened(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(str(path))}?mode=rw", uri=True, timeout=60)


def _engine(path: Path) -> Any:
    from sqlalchemy import create_engine

    return create_engine(f"sqlite:///{path.resolve()}")
