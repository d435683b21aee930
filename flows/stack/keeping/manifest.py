"""What a backup holds, by name: size, SHA-256, permissions and time of each file, under a SHA-256 of their own."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from components.base.errors import TetherError, UserError
from components.base.files import write_whole
from components.base.hashing import digest_json
from components.store.folder import open_regular
from components.store.records import check_names
from tasks.runs.schema import newer

MANIFEST = "manifest.json"
BACKUP_SCHEMA = 1
"""The form of a backup's folder."""
CHUNK = 1 << 20


class BackedUpFile(BaseModel):
    """One file."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    modified: float
    """Seconds since 1970: records are listed by it."""


class Manifest(BaseModel):
    """The whole backup."""

    schema_version: int = BACKUP_SCHEMA
    tether: str
    """The version that made it."""
    created: str
    """UTC, ISO 8601."""
    host: str
    home: str
    """Where the home was."""
    home_schema: int | None
    """None of a home without runs."""
    shared: str = ""
    """What `TETHER_STORE` named, if the backup has that store."""
    stack: dict[str, Any] | None = None
    """The stack's config; None where there was none."""
    left_out: list[str]
    """What of the home is not in it."""
    files: dict[str, BackedUpFile]
    """Maps a path relative to the backup's folder to its file."""

    def below(self, folder: str) -> dict[str, BackedUpFile]:
        """Return the files below a folder of the backup, by their path relative to that."""
        start = f"{folder}/"
        return {name.removeprefix(start): file for name, file in self.files.items() if name.startswith(start)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write it, last: without it a folder is no backup."""
    body = json.loads(manifest.model_dump_json())
    write_whole(folder / MANIFEST, json.dumps({"backup": body, "sha256": digest_json(body)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the backup in `folder`.

    Raises:
        UserError: the folder is no backup, the manifest is damaged, or a newer Tether made it.
    """
    path = folder / MANIFEST
    try:
        with open_regular(path) as file:
            document = json.loads(file.read())
        body = document["backup"]
        if digest_json(body) != document["sha256"]:
            raise ValueError("its own SHA-256 does not hold")
        if body["schema_version"] > BACKUP_SCHEMA:
            raise newer(path, "backup", body["schema_version"], BACKUP_SCHEMA)
        found = Manifest.model_validate(body)
        check_names(found.files)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is no backup: it has no {MANIFEST}. Name a folder that `tether backup` wrote."
        ) from error
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError, TetherError) as error:
        raise UserError(
            f"{path} is damaged ({str(error).splitlines()[0]}), so nothing was restored. Take another copy of the "
            f"backup."
        ) from error
    return found


def checked(folder: Path, name: str, file: BackedUpFile) -> Iterator[bytes]:
    """Give a backed-up file piece by piece.

    Raises:
        UserError: at its end, where the bytes are not those that were backed up; or it can't be read.
    """
    digest, path = hashlib.sha256(), folder / name
    try:
        with open_regular(path) as source:
            while data := source.read(CHUNK):
                digest.update(data)
                yield data
    except OSError as error:
        raise UserError(
            f"{path} can't be read ({error.strerror}), so nothing was restored. Take another copy of the backup."
        ) from error
    if digest.hexdigest() != file.sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is not the manifest's, so nothing was restored. Take another copy of the "
            f"backup."
        )
