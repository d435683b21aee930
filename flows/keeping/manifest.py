"""The manifest of a backup: size, SHA-256, permissions and time of each file, protected by its own SHA-256."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from components.base.errors import TetherError, UserError
from components.base.files import write_whole
from components.base.hashing import digest_json
from components.base.paths import open_regular, read_regular
from components.store.records import check_names
from tasks.runs.schema import newer

MANIFEST = "manifest.json"
BACKUP_SCHEMA = 2
"""The number of the backup folder's format. Format 1 has the servers' data in the folder `stack`."""
CHUNK = 1 << 20
LARGEST_MANIFEST = 512 << 20
"""Bytes of the largest manifest that is read. A file takes about 250 in it, so two million files fit."""


class BackedUpFile(BaseModel):
    """A file in a backup."""

    size: Annotated[int, Field(ge=0)]
    """In bytes."""
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    mode: Annotated[int, Field(ge=0, le=0o777)] = 0o600
    modified: float
    """Seconds since 1970. Restored records are added in this order."""


class Manifest(BaseModel):
    """The content of a whole backup."""

    schema_version: int = BACKUP_SCHEMA
    tether: str
    """The version of Tether that made it."""
    created: str
    """UTC, ISO 8601."""
    host: str
    home: str
    """The path of the home."""
    home_schema: int | None
    """None for a home without runs."""
    shared: str = ""
    """The store that `TETHER_STORE` named, if the backup includes it."""
    stack: dict[str, Any] | None = None
    """In format 1: the config of the servers that Tether started, if the backup includes them."""
    left_out: list[str]
    """The parts of the home that the backup leaves out."""
    files: dict[str, BackedUpFile]
    """Maps a path relative to the backup's folder to the file's properties."""

    @property
    def servers(self) -> str:
        """Return the folder of the servers' data."""
        return "servers" if self.stack is None else "stack"

    def below(self, folder: str) -> dict[str, BackedUpFile]:
        """Return the files below a folder of the backup, by path relative to that folder."""
        start = f"{folder}/"
        return {name.removeprefix(start): file for name, file in self.files.items() if name.startswith(start)}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, as the last file: a folder without it is not a backup."""
    body = json.loads(manifest.model_dump_json())
    write_whole(folder / MANIFEST, json.dumps({"backup": body, "sha256": digest_json(body)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the backup in `folder`.

    Raises:
        UserError: the folder is not a backup, the manifest is damaged, or a newer Tether made it.
    """
    path = folder / MANIFEST
    try:
        document = json.loads(read_regular(path, LARGEST_MANIFEST))
        body = document["backup"]
        if digest_json(body) != document["sha256"]:
            raise ValueError("its own SHA-256 does not match")
        if body["schema_version"] > BACKUP_SCHEMA:
            raise newer(path, "backup", body["schema_version"], BACKUP_SCHEMA)
        manifest = Manifest.model_validate(body)
        check_names(manifest.files)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is not a backup: it has no {MANIFEST}. Name a folder that `tether backup` wrote."
        ) from error
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError, ValidationError, TetherError) as error:
        raise UserError(
            f"{path} is damaged ({str(error).splitlines()[0]}), so nothing was restored. Use another copy of the "
            f"backup."
        ) from error
    return manifest


def checked(folder: Path, name: str, file: BackedUpFile) -> Iterator[bytes]:
    """Yield a backed-up file in pieces.

    Raises:
        UserError: the file can't be read or, raised after the last piece, its bytes are not those that were backed up.
    """
    digest, path = hashlib.sha256(), folder / name
    try:
        with open_regular(path) as source:
            while data := source.read(CHUNK):
                digest.update(data)
                yield data
    except OSError as error:
        raise UserError(
            f"{path} can't be read ({error.strerror}), so nothing was restored. Use another copy of the backup."
        ) from error
    if digest.hexdigest() != file.sha256:
        raise UserError(
            f"{path} is damaged: its SHA-256 is not the manifest's, so nothing was restored. Use another copy of the "
            f"backup."
        )
