"""`tether upgrade`: convert a home of an earlier Tether to this version's format.

Each step goes from one format number to the next and can be repeated after any interruption: it replaces one file at a
time, and changes the home's number last. Files that a step has not reached are read as before.
"""

import fcntl
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.files import sync
from components.store.records import STAGE, Record
from components.store.retention import Stored, stored
from components.store.store import ArtifactStore
from tasks.runs.schema import HOME_SCHEMA, RUN_SCHEMA, check_home, home_schema, write_schema
from tasks.runs.status import RUN_FILE, Part, RunFile, StageStatus, load_readable, read_file, write_file
from tasks.stages import STAGES
from tasks.tracking.client import check_database
from tasks.tracking.database import is_outdated, upgrade_database

Say = Callable[[str], object]


class Migration(NamedTuple):
    """A step from one number of a home's format to the next."""

    what: str
    """What it changes, as text for people."""
    migrate: Callable[[Path, Say], None]
    """Changes a home; may be called again after an interruption."""


def due(home: Path) -> list[str]:
    """Return what `upgrade` would do, one line per step.

    Raises:
        UserError: a newer Tether has written the home.
    """
    check_home(home)
    schema = home_schema(home)
    found = []
    if schema is not None:
        found = [
            f"home schema {number} to {number + 1}: {MIGRATIONS[number].what}" for number in range(schema, HOME_SCHEMA)
        ]
    database = home / "mlflow.db"
    check_database(home)
    if database.is_file() and database.stat().st_size and is_outdated(database):
        found.append(f"{database.name}: the tables of the installed MLflow")
    return found


def upgrade(home: Path, say: Say) -> list[str]:
    """Do what is due and return its lines.

    Raises:
        UserError: a run is in progress, or a newer Tether has written the home.
    """
    lines = due(home)
    if not lines:
        return lines
    if running := [each.run for each in load_readable(home)[0] if each.state == "running"]:
        raise UserError(f"upgrade: run {running[0]} is running in {home}. Upgrade when it has ended, or interrupt it.")
    for number in range(home_schema(home) or HOME_SCHEMA, HOME_SCHEMA):
        MIGRATIONS[number].migrate(home, say)
        write_schema(home, number + 1)
    database = home / "mlflow.db"
    if database.is_file() and database.stat().st_size and is_outdated(database):
        with (home / "mlflow.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            upgrade_database(database)
    return lines


def _to_2(home: Path, say: Say) -> None:
    """Add the stage to the names of record files, then sub-stages and warnings to each run.json."""
    store = ArtifactStore(home)
    with store.using():
        for each in stored(store, store.local):
            if isinstance(each.record, Record) and f".{each.record.stage}." not in each.name:
                _name_stage(each, home / "store")
        by_digest: dict[str, list[Record]] = defaultdict(list)
        for each in stored(store, store.place):
            if isinstance(each.record, Record):
                by_digest[each.record.digest].append(each.record)
    for path in sorted((home / "runs").glob(f"*/{RUN_FILE}")):
        try:
            document = read_file(path.parent)
        except UserError as error:
            say(f"{error} It is left unchanged.")
            continue
        if document.schema_version < RUN_SCHEMA:
            write_file(path.parent, _run_of_2(document, by_digest))


def _name_stage(each: Stored, root: Path) -> None:
    """Add the stage to a record's file name. The new name is created first, so the record exists at every moment."""
    assert isinstance(each.record, Record)
    path = root / each.path
    if not STAGE.fullmatch(each.record.stage):
        return
    with suppress(FileExistsError):
        os.link(path, path.with_name(f"{path.stem}.{each.record.stage}.json"))
    sync(path.parent)
    path.unlink()
    sync(path.parent)


def _run_of_2(document: RunFile, by_digest: dict[str, list[Record]]) -> RunFile:
    stages = [each.model_copy(update={"parts": {**_parts(each, by_digest), **each.parts}}) for each in document.stages]
    return document.model_copy(update={"stages": stages, "schema_version": 2})


def _parts(stage: StageStatus, by_digest: dict[str, list[Record]]) -> dict[str, Part]:
    """Return the keys and digests of a stage's sub-stages, from the store's records."""
    own = by_digest.get(stage.digest or "", [])
    record = next((each for each in own if each.key == stage.key), None)
    digests = {stage.digest or "", *(record.inputs.values() if record is not None else ())}
    found = {}
    for sub in (each for each in STAGES.values() if each.shown == stage.name and not each.final):
        made = [each for digest in digests for each in by_digest.get(digest, ()) if each.stage == sub.name]
        if made:
            newest = max(made, key=lambda each: (each.started, each.attempt))
            found[sub.name] = Part(key=newest.key, digest=newest.digest)
    return found


MIGRATIONS: dict[int, Migration] = {
    1: Migration("each run.json names the sub-stages of its stages, files of records their stage", _to_2),
}
"""Maps the number that a step starts from to the step, up to `HOME_SCHEMA`."""
