"""`tether upgrade`: convert a home of the last release to this version's format."""

import fcntl
from pathlib import Path

from components.base.errors import UserError
from tasks.runs.schema import HOME_FILE, HOME_SCHEMA, check_home, home_schema
from tasks.runs.status import load_readable
from tasks.tracking.client import check_database
from tasks.tracking.database import is_outdated, upgrade_database


def due(home: Path) -> list[str]:
    """Return what `upgrade` would do, one line per step.

    Raises:
        UserError: a newer Tether has written the home, or one before release 0.1.0.
    """
    check_home(home)
    if (schema := home_schema(home)) is not None and schema < HOME_SCHEMA:
        raise UserError(
            f"upgrade: {home} has home schema {schema}, from before release 0.1.0. Upgrade it with Tether 0.1.0 first. "
            f'If only its {HOME_FILE} was lost, write {{"schema_version": {HOME_SCHEMA}}} into it.'
        )
    check_database(home)
    database = home / "mlflow.db"
    outdated = database.is_file() and database.stat().st_size and is_outdated(database)
    return [f"{database.name}: the tables of the installed MLflow"] if outdated else []


def upgrade(home: Path) -> list[str]:
    """Do what is due and return its lines.

    Raises:
        UserError: as `due`, or a run is in progress.
    """
    lines = due(home)
    if lines and (running := [each.run for each in load_readable(home)[0] if each.state == "running"]):
        raise UserError(f"upgrade: run {running[0]} is running in {home}. Upgrade when it has ended, or interrupt it.")
    if lines:
        with (home / "mlflow.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            upgrade_database(home / "mlflow.db")
    return lines
