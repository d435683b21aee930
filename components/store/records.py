"""Records and manifests, the store's JSON files, and the checks on the names in them.

A record's file contains the sha256 of its values, so that a changed value is detected; changed white space is not. This
is not a signature: whoever can write both a record and its sha256 can forge one.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, ValidationError, with_config
from typing_extensions import TypedDict

from components.base.errors import TetherError
from components.base.hashing import digest_json
from components.base.settings import Settings
from components.gates.renamed import present_metrics
from components.keys.changes import KeyParts
from components.keys.code_version import CodeVersion

MAX_NAME = 1024
"""Most bytes in a relative path. Linux allows 4096 in a whole path."""
MAX_PART = 255
"""Most bytes in the name of a file or folder, as on nearly every file system."""

SHA = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[0-9a-z]{64}")
STAGE = re.compile(r"[a-z0-9_.]{1,64}")
ATTEMPT = re.compile(rf"([1-9][0-9]{{0,8}})(-[0-9a-f]{{8}})?\.({STAGE.pattern})\.json")
"""The name of a record's file: attempt and stage, so that a stage's records are found by name. The part after the
hyphen makes names unique in stores that overwrite existing files."""
RECORD_SCHEMA = 1
"""The version of the record file's format, its `schema` field; absent means 1. A manifest has none, since its bytes
determine the artifact's digest."""


@with_config(ConfigDict(extra="allow"))
class Environment(TypedDict, total=False):
    """The machine and software with which a record was computed. Only what the job also holds is in the key."""

    python: str
    platform: str
    host: str
    instruction_set: str
    cpu: str
    code: CodeVersion
    whole: dict[str, JsonValue]
    """The values of the options that are in no key, by dotted name. Kept here, since a `Record` of earlier versions of
    Tether has no other place for them."""


class Record(Settings):
    """The result of computing a key: the artifact's files, its inputs, and the metrics that gates judge."""

    # A NaN metric is kept (as text, since JSON has none), so that its gate fails each time it is judged.
    model_config = ConfigDict(ser_json_inf_nan="strings", allow_inf_nan=True)

    stage: str
    key: str
    digest: str
    """sha256 of the canonical JSON of `files`; also the manifest's object."""
    files: dict[str, str]
    """Relative POSIX path to sha256."""
    attachments: dict[str, str] = Field(default_factory=dict)
    """The same for files whose bytes vary between runs (plots, timings). They are not in the digest."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Input name to digest."""
    job: dict[str, JsonValue] = Field(default_factory=dict)
    """The keyed config values."""
    parts: KeyParts = Field(default_factory=KeyParts)
    """Everything from which the key was computed, to explain a miss."""
    metrics: Annotated[dict[str, float], AfterValidator(present_metrics)] = Field(default_factory=dict)
    environment: Environment = Field(default_factory=Environment)
    run: str = ""
    """Tether's id of the run that computed it."""
    started: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Seconds that the process which finished it computed (for a resumed stage: since it resumed)."""
    attempt: int = 0
    """1 for the first record of a key."""
    imported: str = ""
    """When it was imported from another home (UTC, ISO 8601). Empty if this home computed it."""

    @property
    def machine(self) -> dict[str, object]:
        """Return the environment without the version of Tether's code and without options."""
        return {name: value for name, value in self.environment.items() if name not in ("code", "whole", "unkeyed")}

    @property
    def objects(self) -> dict[str, str]:
        """Return every object that the record needs, by its role: the artifact's files, manifest and attachments."""
        attached = {f"attachment {name}": sha for name, sha in self.attachments.items()}
        return {**self.files, "(manifest)": self.digest, **attached}


@dataclass(frozen=True)
class Miss:
    """A lookup that found no valid record, with the reason."""

    reason: str


def attempts_of(names: Iterable[str]) -> list[str]:
    """Return the record files among one key's `names`, newest first."""
    return sorted((name for name in names if ATTEMPT.fullmatch(name)), key=lambda n: (number_of(n), n), reverse=True)


def number_of(name: str) -> int:
    return int(name.partition(".")[0].partition("-")[0])


def record_text(record: Record) -> str:
    """Return the text of a record's file: the fields, and their sha256."""
    # Earlier versions of Tether, which may share the store, refuse a record with an unknown field.
    body = json.loads(record.model_dump_json(exclude=None if record.imported else {"imported"}))
    return json.dumps({"record": body, "sha256": digest_json(body)}, indent=1)


def parse_record(text: str, key: str) -> Record | Miss:
    """Return the record of `key` in a file's text, or why it is not valid."""
    try:
        document = json.loads(text)
        body, schema = document["record"], document.get("schema", 1)
        if schema > RECORD_SCHEMA:
            return Miss(f"a newer Tether wrote the record (schema {schema}; this one reads {RECORD_SCHEMA})")
        if digest_json(body) != document["sha256"]:
            return Miss("the record is damaged (its content does not match its sha256)")
        record = Record.model_validate(body)
        check_files(record.files)
        check_files(record.attachments)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        return Miss(f"the record does not parse ({type(error).__name__})")
    except TetherError as error:
        return Miss(f"the record cannot be trusted: {error}")
    if record.key != key:
        return Miss("the record is of another key")
    if digest_json(record.files) != record.digest:
        return Miss("the record's digest is not that of its files")
    return record


def parse_manifest(data: bytes) -> dict[str, str]:
    """Return relative path to sha256, from a manifest's bytes.

    Raises:
        TetherError: it is not a manifest, or has a path that could lead out of the artifact's folder.
    """
    try:
        files = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TetherError(f"the manifest does not parse ({type(error).__name__})") from error
    if not isinstance(files, dict):
        raise TetherError("the manifest does not parse (no mapping)")
    check_files(files)
    return files


def check_files(files: Mapping[Any, Any]) -> None:
    """Check that a mapping of names to sha256 can be written as files inside one folder.

    Raises:
        TetherError: a name or a sha256 is invalid, or one name is a parent folder of another.
    """
    check_names(files)
    for name, sha in files.items():
        if not isinstance(sha, str) or not SHA.fullmatch(sha):
            raise TetherError(f"{name!r} has {sha!r} where a sha256 must be")


def check_names(names: Iterable[Any]) -> None:
    """Check that names are relative paths inside their folder, on any system, and that none is another's parent.

    Raises:
        TetherError: one is empty, absolute or too long, or has `..`, a backslash, a drive or a control character.
    """
    names = list(names)
    for name in names:
        if not isinstance(name, str) or not _is_inside(name):
            text = repr(name)
            raise TetherError(
                f"{text if len(text) < 90 else text[:80] + '...'} is not a relative path inside its folder: without "
                f"`..`, backslash, drive and control characters, of at most {MAX_PART} bytes in a part and {MAX_NAME} "
                "in all"
            )
    unique = set(names)
    for name in names:
        for above in PurePosixPath(name).parents:
            if str(above) in unique:
                raise TetherError(f"{str(above)!r} is both a file and the folder of {name!r}")


def _is_inside(name: str) -> bool:
    if re.search(r"[\x00-\x1f\x7f\\\ud800-\udfff]", name) or re.match(r"[A-Za-z]:", name):
        return False
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        return False
    return max(len(part.encode()) for part in parts) <= MAX_PART and len(name.encode()) <= MAX_NAME
