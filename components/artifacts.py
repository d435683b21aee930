"""The artifact store: files by content, a record per computed key, and a hit only where every byte still holds.

store/objects/<sha256>              file contents (read-only), manifests among them
store/records/<key>/<attempt>.json  what a key was computed to; writing it is the commit
store/views/<digest>/               an artifact as a folder of links to objects, made when asked for
work/<key>/, work/<key>.lock        where a stage computes, and who does
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, Field, ValidationError

from components.canonical import canonical_json, digest_file, digest_json
from components.errors import TetherError
from components.files import replacing, sync
from components.settings import Settings

logger = logging.getLogger(__name__)


class Record(Settings):
    """What computing a key gave: the artifact's files, where they came from, and the metrics to judge."""

    # A NaN metric is kept (as text, JSON has none): its gate must fail on every look at it.
    model_config = ConfigDict(ser_json_inf_nan="strings")

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
    job: dict[str, Any] = Field(default_factory=dict)
    """The keyed config values."""
    parts: dict[str, Any] = Field(default_factory=dict)
    """Everything the key was made of, to explain a miss."""
    metrics: dict[str, float] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)
    run: str = ""
    """Our run id of the run that computed it."""
    started: str = ""
    """UTC, ISO 8601."""
    seconds: float = 0.0
    """Computing time of the process that finished it (a resumed stage: since the resume)."""
    attempt: int = 0
    """1 for the first record of a key."""


@dataclass(frozen=True)
class Miss:
    """A lookup found nothing to trust, and why."""

    reason: str


class ArtifactStore:
    """The store below one `TETHER_HOME`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.objects = home / "store" / "objects"
        self.records = home / "store" / "records"
        self.views = home / "store" / "views"
        self.work = home / "work"
        self._verified: dict[str, tuple[int, int, int]] = {}

    # -- computing ---------------------------------------------------------------------------------------------------

    def work_folder(self, key: str) -> Path:
        """Where the stage of `key` computes (not created)."""
        return self.work / key

    @contextlib.contextmanager
    def lock(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold `key` against other processes; `on_wait` is called once where another one holds it.

        The lock dies with its process (flock), so that a killed holder leaves none behind.
        """
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{key}.lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def publish(self, key: str, folder: Path, attachments: Path | None, record: Mapping[str, Any]) -> Record:
        """Move the files below `folder` and `attachments` into the store, then commit by writing the record.

        A kill at any instant leaves either no new record or the whole of it. The files are moved, not copied: a
        stage that is killed in here computes its last step again from its checkpoint.

        Args:
            key: the stage's key.
            folder: deterministic files; their paths and contents are the artifact's digest.
            attachments: other files to keep beside it, or None.
            record: `Record`'s remaining fields (stage, inputs, job, metrics, ...).

        Raises:
            TetherError: `folder` holds no file, or holds a symbolic link.
        """
        files = self._store(folder)
        if not files:
            raise TetherError(f"the stage {record.get('stage')} wrote no file into {folder}")
        kept = self._store(attachments) if attachments is not None else {}
        digest = self._store_manifest(files)
        return self._commit(key, {**record, "key": key, "digest": digest, "files": files, "attachments": kept})

    # -- reading -----------------------------------------------------------------------------------------------------

    def lookup(self, key: str) -> Record | Miss:
        """The newest record of `key` whose files all hold, else why there is none."""
        reasons = []
        for attempt in self.attempts(key):
            found = self._read(key, attempt)
            if isinstance(found, Record):
                damage = self._damage(found.files, found.digest)
                if damage is None:
                    self._warn_of_lost_attachments(found)
                    return found
                found = Miss(damage)
            reasons.append(f"attempt {attempt}: {found.reason}")
        return Miss("; ".join(reasons) or "no record")

    def attempts(self, key: str) -> list[int]:
        """Attempt numbers with a record file for `key`, newest first."""
        folder = self.records / key
        names = os.listdir(folder) if folder.is_dir() else []
        numbers = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return sorted((int(number) for number in numbers if number.isdigit()), reverse=True)

    def published(self, key: str) -> list[Record]:
        """Every record of `key` that parses, newest first; their files are not looked at."""
        found = (self._read(key, attempt) for attempt in self.attempts(key))
        return [record for record in found if isinstance(record, Record)]

    def path(self, artifact: Record | str) -> Path:
        """A readable folder of an artifact, given its record or digest.

        Raises:
            TetherError: the store has no such artifact, or its manifest is damaged.
        """
        digest = artifact if isinstance(artifact, str) else artifact.digest
        files = self._manifest(digest)
        view = self.views / digest
        if not all((view / name).is_file() for name in files):
            self._link(view, files)
        return view

    def attachment(self, record: Record, name: str) -> Path | None:
        """The file of one attachment, or None where the record has none of that name or its object is lost."""
        digest = record.attachments.get(name)
        return self.objects / digest if digest and self._problem(digest) is None else None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _store(self, folder: Path) -> dict[str, str]:
        self.objects.mkdir(parents=True, exist_ok=True)
        files = {}
        for path in _files(folder):
            digest = digest_file(path)
            files[path.relative_to(folder).as_posix()] = digest
            path.chmod(0o444)
            sync(path)
            try:
                # Replaces an object of that name too: the old one may be the damaged one that made us compute.
                os.replace(path, self.objects / digest)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                self._write(self.objects / digest, path)
                path.unlink()
            self._verified.pop(digest, None)
        sync(self.objects)
        return files

    def _store_manifest(self, files: Mapping[str, str]) -> str:
        digest = digest_json(dict(files))
        self._write(self.objects / digest, canonical_json(dict(files)))
        return digest

    def _commit(self, key: str, fields: Mapping[str, Any]) -> Record:
        folder = self.records / key
        folder.mkdir(parents=True, exist_ok=True)
        attempt = max(self.attempts(key), default=0) + 1
        record = Record(**{**fields, "attempt": attempt})
        body = json.loads(record.model_dump_json())
        self._write(folder / f"{attempt}.json", json.dumps({"record": body, "sha256": digest_json(body)}, indent=1))
        return record

    def _read(self, key: str, attempt: int) -> Record | Miss:
        try:
            document = json.loads((self.records / key / f"{attempt}.json").read_text())
            body = document["record"]
            if digest_json(body) != document["sha256"]:
                return Miss("the record is damaged (its own sha256 does not hold)")
            record = Record.model_validate(body)
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            return Miss(f"the record does not parse ({type(error).__name__})")
        if record.key != key:
            return Miss("the record is of another key")
        if digest_json(record.files) != record.digest:
            return Miss("the record's digest is not that of its files")
        return record

    def _damage(self, files: Mapping[str, str], digest: str) -> str | None:
        for name, sha in {**files, "(manifest)": digest}.items():
            problem = self._problem(sha)
            if problem is not None:
                return f"object {problem}: {name} ({sha[:12]})"
        return None

    def _problem(self, sha: str) -> str | None:
        """`missing`, `damaged` or None; a file seen whole by this process is read again only if it changed."""
        path = self.objects / sha
        try:
            info = path.stat()
            mark = (info.st_ino, info.st_size, info.st_mtime_ns)
            if self._verified.get(sha) != mark:
                if digest_file(path) != sha:
                    return "damaged"
                self._verified[sha] = mark
        except OSError:
            return "missing"
        return None

    def _warn_of_lost_attachments(self, record: Record) -> None:
        lost = [name for name, sha in record.attachments.items() if self._problem(sha) is not None]
        if lost:
            logger.warning("%s: attachments are missing or damaged (the artifact is whole): %s", record.stage, lost)

    def _manifest(self, digest: str) -> dict[str, str]:
        problem = self._problem(digest)
        if problem is not None:
            raise TetherError(f"the manifest of artifact {digest[:12]} is {problem} in {self.objects}")
        return json.loads((self.objects / digest).read_text())

    def _link(self, view: Path, files: Mapping[str, str]) -> None:
        building = self.views / f".{view.name}.{uuid.uuid4().hex}"
        for name, sha in files.items():
            link = building / name
            link.parent.mkdir(parents=True, exist_ok=True)
            # Relative, so that a home folder can be moved.
            link.symlink_to(os.path.relpath(self.objects / sha, link.parent))
        if view.exists():
            view.rename(self.views / f"{building.name}.old")
        # Another process may have made the same view meanwhile: then its links are the same.
        with contextlib.suppress(OSError):
            building.rename(view)
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(self.views / f"{building.name}.old", ignore_errors=True)
        missing = [name for name in files if not (view / name).is_file()]
        if missing:
            raise TetherError(f"artifact {view.name[:12]} lacks {missing} in {self.objects}")

    def _write(self, target: Path, content: str | Path) -> None:
        """Create or replace `target` read-only in one step, from a text or another file's bytes."""
        with replacing(target) as temporary:
            if isinstance(content, Path):
                shutil.copyfile(content, temporary)
            else:
                temporary.write_text(content)
            temporary.chmod(0o444)
        sync(target.parent)


def digest_folder(folder: Path) -> str:
    """An artifact's digest computed from a plain folder: sha256 of canonical JSON `{relative path: sha256}`."""
    return digest_json({path.relative_to(folder).as_posix(): digest_file(path) for path in _files(folder)})


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    paths = sorted(path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink())
    links = [path for path in paths if path.is_symlink()]
    if links:
        raise TetherError(f"{links[0]} is a symbolic link: an artifact holds plain files")
    return paths
