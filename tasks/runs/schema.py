"""The form in which a home is written: older ones are read, and a newer Tether's is refused in a sentence.

`home.json` holds the home's number; a home with runs and without that file is of form 1, an empty one has none yet.
Each run.json holds its own (`RunFile.schema_version`), since runs of several forms lie beside each other until
`tether upgrade`.
"""

import json
import logging
import os
from pathlib import Path

from pydantic import BaseModel, Field

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.store.folder import open_regular

logger = logging.getLogger(__name__)

HOME_FILE = "home.json"
HOME_SCHEMA = 2
"""What this version writes. 2: run.json names its form and the sub-stages, records of the store have their stage's name
in that of their file. `flows/stack/keeping/upgrade.py` has a step from each number to the next."""
RUN_SCHEMA = 2
"""Of run.json. 2: every verdict says whether it only warns, every stage the keys of its sub-stages."""


_LONGEST = 1 << 16
"""Bytes that are read of home.json."""


class _Home(BaseModel):
    schema_version: int = Field(ge=1)


class _Any(BaseModel):
    schema_version: int = 1


def home_schema(home: Path) -> int | None:
    """Return the number of a home's format; None for a home without runs.

    Raises:
        UserError: home.json is damaged.
    """
    path = home / HOME_FILE
    try:
        with open_regular(path) as file:
            return _Home.model_validate_json(file.read(_LONGEST)).schema_version
    except FileNotFoundError:
        return 1 if _has_runs(home) else None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged ({str(error).splitlines()[0]}). Restore it; it holds "
            f'{{"schema_version": {HOME_SCHEMA}}} where this version of Tether last wrote the home.'
        ) from error


def check_home(home: Path) -> None:
    """Refuse a home that a newer Tether has written. A warning names a damaged home.json, which hides no run.

    Raises:
        UserError: it has.
    """
    try:
        found = home_schema(home)
    except UserError as error:
        logger.warning("%s", error)
        return
    if found is not None and found > HOME_SCHEMA:
        raise newer(home / HOME_FILE, "home", found, HOME_SCHEMA)


def mark_home(home: Path) -> None:
    """Write the number of this version's format into a home without runs."""
    if not (home / HOME_FILE).exists() and not _has_runs(home):
        write_schema(home, HOME_SCHEMA)


def write_schema(home: Path, number: int) -> None:
    """Write the number of a home's format."""
    make_folder(home)
    write_whole(home / HOME_FILE, json.dumps({"schema_version": number}) + "\n")


def newer(path: Path | str, what: str, found: int, known: int) -> UserError:
    """Return the error message for a file that a newer Tether wrote."""
    return UserError(
        f"{path} was written by a newer Tether ({what} schema {found}; this one reads up to {known}). Install that "
        f"version or a later one, as `git pull && make install`, or name another folder in TETHER_HOME."
    )


def written_by_newer(data: bytes) -> int | None:
    """Return the number in the bytes of a run.json that a newer Tether has written; None of any other."""
    try:
        found = _Any.model_validate_json(data).schema_version
    except ValueError:
        return None
    return found if found > RUN_SCHEMA else None


def _has_runs(home: Path) -> bool:
    try:
        with os.scandir(home / "runs") as entries:
            return any(not entry.name.startswith(".") and (Path(entry) / "run.json").is_file() for entry in entries)
    except FileNotFoundError:
        return False
