"""What the store says in JSON: records and manifests, and which names it believes.

A record's file holds the sha256 of what it says: an edit that changes a value is seen, one of white space is not. (That
is no signature: who can write both a record and its sha256 can forge.)
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from pydantic import ConfigDict, Field, JsonValue, ValidationError, with_config
from typing_extensions import TypedDict

from components.base.errors import TetherError
from components.base.hashing import digest_json
from components.base.settings import Settings
from components.keys.changes import KeyParts
from components.keys.code_version import CodeVersion

MAX_NAME = 1024
"""Bytes in a relative path; Linux ends paths at 4096."""
MAX_PART = 255
"""Bytes in a file's or folder's own name, as nearly every file system has it."""

SHA = re.compile(r"[0-9a-f]{64}")
KEY = re.compile(r"[0-9a-z]{64}")
STAGE = re.compile(r"[a-z0-9_.]{1,64}")
ATTEMPT = re.compile(rf"([1-9][0-9]{{0,8}})(-[0-9a-f]{{8}})?(?:\.({STAGE.pattern}))?\.json")
"""A record's file: its attempt and its stage, so that a stage's records are found by name (older ones, and those of an
export, name none). The part after the hyphen stands where the file system can't refuse a name that is there."""
RECORD_SCHEMA = 1
"""Of a record's file, as `schema` beside the record; 1 is left unsaid. A manifest has none: its bytes are a digest."""
GAP = 1000
"""Numbers of attempts rise by one. One that is so far above the others was not given by `ArtifactStore.commit`, and if
it counted, the next one might be too long to be a record's."""


@with_config(ConfigDict(extra="allow"))
class Environment(TypedDict, total=False):
    """Where a record was computed. None of it is in the key beyond what the job holds."""

    python: str
    platform: str
    host: str
    instruction_set: str
    cpu: str
    code: CodeVersion


class Record(Settings):
    """What computing a key gave: the artifact's files, where they came from, and the metrics to judge."""

    # A NaN metric is kept (as text, JSON has none): its gate must fail on every look at it.
    model_config = ConfigDict(ser_json_inf_nan="strings", allow_inf_nan=True)

    stage: str
    key: str
    digest: str
    """sha256 of the canonical JSON of `files`; also the manifest's object."""
    files: dict[str, str]
    """Relative POSIX path to sha256."""
    attachments: dict[str, str] = Field(default_factory=dict)
    """The same for files that aren't byte-stable (plots, timings) and so no part of the digest."""
    inputs: dict[str, str] = Field(default_factory=dict)
    """Input name to digest."""
    job: dict[str, JsonValue] = Field(default_factory=dict)
    """The keyed config values."""
    parts: KeyParts = Field(default_factory=KeyParts)
    """Everything the key was made of, to explain a miss."""
    metrics: dict[str, float] = Field(default_factory=dict)
    environment: Environment = Field(default_factory=Environment)
    run: str = ""
    """Our run id of the run that computed it."""
    started: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Computing time of the process that finished it (a resumed stage: since the resume)."""
    attempt: int = 0
    """1 for the first record of a key."""
    imported: str = ""
    """When it was imported (UTC, ISO 8601): another home says that it computed it. Empty where this home did."""

    @property
    def machine(self) -> dict[str, object]:
        """The environment without our code's version."""
        return {name: value for name, value in self.environment.items() if name != "code"}

    @property
    def objects(self) -> dict[str, str]:
        """Every object it needs, by what it is: the artifact's files, its manifest, the attachments."""
        attached = {f"attachment {name}": sha for name, sha in self.attachments.items()}
        return {**self.files, "(manifest)": self.digest, **attached}


@dataclass(frozen=True)
class Miss:
    """A lookup found nothing to trust, and why."""

    reason: str


def attempts_of(names: Iterable[str]) -> list[str]:
    """The files of one key's records among `names`, newest first, without those whose number was not counted up to."""
    by_number = sorted((number_of(name), name) for name in names if ATTEMPT.fullmatch(name))
    found: list[str] = []
    last = 0
    for number, name in by_number:
        if number > last + GAP:
            break
        found, last = [name, *found], number
    return found


def number_of(name: str) -> int:
    """The attempt in the name of a record's file."""
    return int(name.partition(".")[0].partition("-")[0])


def record_text(record: Record) -> str:
    """A record as its file holds it: the fields, and their sha256."""
    # Earlier versions, which may share the store, read no record with a field that they don't know.
    body = json.loads(record.model_dump_json(exclude=None if record.imported else {"imported"}))
    return json.dumps({"record": body, "sha256": digest_json(body)}, indent=1)


def parse_record(text: str, key: str) -> Record | Miss:
    """The record of `key` that a file's text is, or why it is none."""
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
    if "/" in record.run or record.run.startswith("."):
        return Miss("the record cannot be trusted: its run is not a run's id")
    return record


def parse_manifest(data: bytes) -> dict[str, str]:
    """Relative path to sha256, from a manifest's bytes.

    Raises:
        TetherError: it is not a manifest, or names what could lie outside the artifact's folder.
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
    """See that a mapping of names to sha256 can be made into a folder, within that folder.

    Raises:
        TetherError: a name or a sha256 is none, or one name is a folder above another.
    """
    check_names(files)
    for name, sha in files.items():
        if not isinstance(sha, str) or not SHA.fullmatch(sha):
            raise TetherError(f"{name!r} has {sha!r} where a sha256 must be")


def check_names(names: Iterable[Any]) -> None:
    """See that names are relative paths that stay in their folder, on any system, and that none is another's folder.

    Raises:
        TetherError: one is empty, absolute, over-long, has `..`, a backslash, a drive or a control character.
    """
    names = list(names)
    for name in names:
        problem = "no text" if not isinstance(name, str) else _problem(name)
        if problem:
            shown = repr(name)
            raise TetherError(f"a file's name has {problem}: {shown if len(shown) < 90 else shown[:80] + '...'}")
    known = set(names)
    for name in names:
        for above in PurePosixPath(name).parents:
            if str(above) in known:
                raise TetherError(f"{str(above)!r} is both a file and the folder of {name!r}")


def _problem(name: str) -> str | None:
    parts = name.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        return "characters that are not Unicode"
    if re.search(r"[\x00-\x1f\x7f]", name):
        return "a control character"
    if "\\" in name:
        return "a backslash"
    if re.match(r"[A-Za-z]:", name):
        return "a drive"
    if name.startswith("/"):
        return "an absolute path"
    if any(part in ("", ".", "..") for part in parts):
        return "an empty part, `.` or `..`"
    if max(sizes) > MAX_PART or sum(sizes) + len(sizes) - 1 > MAX_NAME:
        return f"more than {MAX_PART} bytes in a part or {MAX_NAME} in all"
    return None
