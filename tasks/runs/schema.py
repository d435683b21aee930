"""The formats of a home and of its runs. Those of other versions of Tether are refused with a message.

`home.json` holds the home's number. Each run.json has its own number (`RunFile.schema_version`).
"""

import json
import logging
from pathlib import Path

from pydantic import BaseModel, Field

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.base.paths import open_regular

logger = logging.getLogger(__name__)

HOME_FILE = "home.json"
HOME_SCHEMA = 2
"""The home's format that this version reads and writes."""
RUN_SCHEMA = 2
"""The format of run.json, likewise. 1: before release 0.1.0, whose `tether upgrade` converts it."""

_LONGEST = 1 << 16
"""The largest number of bytes read of home.json."""


class _Home(BaseModel):
    schema_version: int = Field(ge=1)


class _Run(BaseModel):
    schema_version: int = 1


def home_schema(home: Path) -> int | None:
    """Return the number of a home's format; None for a home without runs or without home.json.

    Raises:
        UserError: home.json is damaged.
    """
    path = home / HOME_FILE
    try:
        with open_regular(path) as file:
            return _Home.model_validate_json(file.read(_LONGEST)).schema_version
    except FileNotFoundError:
        return None
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
        version = home_schema(home)
    except UserError as error:
        logger.warning("%s", error)
        return
    if version is not None and version > HOME_SCHEMA:
        raise newer(home / HOME_FILE, "home", version, HOME_SCHEMA)


def mark_home(home: Path) -> None:
    """Write the number of this version's format into a home that has none and no runs, which may be of another."""
    if not (home / HOME_FILE).exists() and not any((home / "runs").glob("*/run.json")):
        make_folder(home)
        write_whole(home / HOME_FILE, json.dumps({"schema_version": HOME_SCHEMA}) + "\n")


def newer(path: Path | str, what: str, version: int, newest: int) -> UserError:
    """Return the error message for a file that a newer Tether wrote."""
    return UserError(
        f"{path} was written by a newer Tether ({what} schema {version}; this one reads up to {newest}). Install that "
        f"version or a later one, as `git pull && make install`, or name another folder in TETHER_HOME."
    )


def check_run(path: Path, data: bytes) -> None:
    """Refuse `data`, the bytes of the run.json at `path`, if another version of Tether wrote another format.

    Raises:
        UserError: the format is newer or older. Damaged data are left to the reader of the whole file.
    """
    try:
        version = _Run.model_validate_json(data).schema_version
    except ValueError:
        return
    if version > RUN_SCHEMA:
        raise newer(path, "run", version, RUN_SCHEMA)
    if version < RUN_SCHEMA:
        raise UserError(
            f"{path} was written by a Tether before 0.1.0 (run schema {version}; this one reads {RUN_SCHEMA}). Run "
            f"`tether upgrade` of release 0.1.0, or move the folder {path.parent} out of {path.parent.parent}."
        )
