"""`tether upgrade`: bring what an earlier version wrote up to date. At present that is MLflow's tables.

A later format of the home gets a step here, which can be repeated after any interruption: it replaces one file at a
time, and changes the home's number last.
"""

from pathlib import Path

from components.base.errors import UserError
from components.store.leases import leased
from tasks.runs.schema import check_home, home_schema
from tasks.runs.status import load_readable
from tasks.tracking.database import is_outdated, upgrade_database
from tasks.tracking.mlflow_client import check_database


def due(home: Path) -> list[str]:
    """Return what `upgrade` would do, one line per step.

    Raises:
        UserError: a newer Tether has written the home, or its home.json or database is damaged.
    """
    check_home(home)
    home_schema(home)
    database = home / "mlflow.db"
    check_database(home)
    outdated = database.is_file() and database.stat().st_size and is_outdated(database)
    return [f"{database.name}: the tables of the installed MLflow"] if outdated else []


def upgrade(home: Path) -> list[str]:
    """Do what is due and return its lines.

    Raises:
        UserError: a run is in progress, or as `due`.
    """
    if not (lines := due(home)):
        return lines
    if running := [status.run for status in load_readable(home)[0] if status.state == "running"]:
        raise UserError(f"upgrade: run {running[0]} is running in {home}. Upgrade when it has ended, or interrupt it.")
    with leased(home / "mlflow.lock"):
        upgrade_database(home / "mlflow.db")
    return lines
