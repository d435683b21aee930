"""The formats of a home and of its runs: older ones can be read; those of a newer Tether are refused with a message.

`home.json` holds the home's number. A home with runs but without that file has format 1; an empty home has none. Each
run.json has its own number (`RunFile.schema_version`), because runs of different formats can be in one home until
`tether upgrade`.
"""

import json
import logging
import os
from pathlib import Path

from pydantic import BaseModel, Field

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.base.paths import open_regular

logger = logging.getLogger(__name__)

HOME_FILE = "home.json"
HOME_SCHEMA = 2
"""The home's format that this version writes. 2: run.json has a format number and the sub-stages, and the file names of
records include the stage. `tether upgrade` refuses number 1, which versions before release 0.1.0 wrote."""
RUN_SCHEMA = 2
"""The format of run.json. 2: every verdict says whether it only warns, and every stage has its sub-stages' keys."""


_LONGEST = 1 << 16
"""The largest number of bytes read of home.json."""


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
            f'{{"schema_version": {HOME_SCHEMA}}} if this version of Tether last wrote the home.'
        ) from error


def check_home(home: Path) -> None:
    """Refuse a home that a newer Tether has written. A damaged home.json only causes a warning, because runs are
    readable.

    Raises:
        UserError: a newer Tether has written the home.
    """
    try:
        found = home_schema(home)
    except UserError as error:
        logger.warning("%s", error)
        return
    if found is not None and found > HOME_SCHEMA:
        raise newer(home / HOME_FILE, "home", found, HOME_SCHEMA)


def mark_home(home: Path) -> None:
    """Write the number of this version's format into a home that has no runs."""
    if not (home / HOME_FILE).exists() and not _has_runs(home):
        make_folder(home)
        write_whole(home / HOME_FILE, json.dumps({"schema_version": HOME_SCHEMA}) + "\n")


def newer(path: Path | str, what: str, found: int, known: int) -> UserError:
    """Return the error message for a file that a newer Tether wrote."""
    return UserError(
        f"{path} was written by a newer Tether ({what} schema {found}; this one reads up to {known}). Install that "
        f"version or a later one, as `git pull && make install`, or name another folder in TETHER_HOME."
    )


def written_by_newer(data: bytes) -> int | None:
    """Return the format number in the bytes of a run.json if a newer Tether wrote it; otherwise None."""
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
