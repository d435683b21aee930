"""The artifact store: files by content, a record per computed key, and a cache hit only if every byte is verified.

store/objects/<sha256>              file contents (read-only), manifests among them
store/records/<key>/<attempt>.<stage>.json  what a key was computed to; writing it is the commit
store/pins/<run>.json               what a pinned run needs
store/views/<digest>/               an artifact as a folder of links to objects, made on request
work/<key>/, work/<key>.lock        where a stage computes, and the lock of who computes it

If `TETHER_STORE` names another folder or a URL, objects, records and pins are there. store/objects then holds copies of
what was published or read here, each verified on arrival.
"""

import contextlib
import logging
import os
import shutil
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from components.base.errors import TetherError, UserError, disk_error
from components.base.files import make_folder
from components.base.hashing import digest_file, digest_json
from components.base.paths import files_read, user_path
from components.store.folder import FolderPlace
from components.store.leases import Lease, if_free, is_held, leased
from components.store.objects import Objects
from components.store.place import VARIABLE, Place
from components.store.records import ATTEMPT, Miss, Record, attempts_of, number_of, parse_record, record_text
from components.store.views import view

logger = logging.getLogger(__name__)


class ArtifactStore:
    """The store of one `TETHER_HOME`: in that folder, or where `TETHER_STORE` says unless `alone` is set."""

    def __init__(self, home: Path, alone: bool = False) -> None:
        self.home = home
        self.local = FolderPlace(home / "store")
        self.shared: Place | None = None if alone else shared_place(home)
        self.contents = Objects(self.local, self.shared)
        self.objects = self.contents.folder
        self.views = home / "store" / "views"
        self.work = home / "work"

    @property
    def place(self) -> Place:
        """Return the place whose records count."""
        return self.shared or self.local

    def work_folder(self, key: str) -> Path:
        """Return the folder in which the stage of `key` computes. It is not created."""
        return self.work / key

    def lock(self, key: str, on_wait: Callable[[], None] | None = None) -> contextlib.AbstractContextManager[Lease]:
        """Lock `key` against other processes, also on other machines that share this home.

        `on_wait` is called once if another process holds it. The lock of a dead process is freed; see `leases`.

        Raises:
            UserError: a run of release 0.1.0 may still compute it.
        """
        if self._held_by_0_1_0(key):
            raise UserError(
                f"{self.work / key}: a run of Tether 0.1.0 computes this, or ended less than a minute ago. End it, and "
                "run the same command again after a minute."
            )
        return leased(self.work / f"{key}.lock", on_wait)

    def _held_by_0_1_0(self, key: str) -> bool:
        """Return whether a run of release 0.1.0 may compute `key`: its lock was a file that it touched every 5 s. The
        locks of those that ended are removed."""
        folder = self.work / f"{key}.leases"
        for file in folder.glob("*.held"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime < 60:
                    return True
        shutil.rmtree(folder, ignore_errors=True)
        return False

    def if_free(self, key: str) -> contextlib.AbstractContextManager[bool]:
        """Lock `key` if no other process holds it; yields whether it is locked."""
        busy = self._held_by_0_1_0(key)
        return contextlib.nullcontext(False) if busy else if_free(self.work / f"{key}.lock")

    def held_keys(self) -> set[str]:
        """Return the keys that some process is computing."""
        earlier = {path.stem for path in self.work.glob("*.leases") if self._held_by_0_1_0(path.stem)}
        return earlier | {path.stem for path in self.work.glob("*.lock") if is_held(path)}

    def publish(
        self,
        key: str,
        folder: Path,
        attachments: Path | None,
        record: Mapping[str, object],
        before_commit: Callable[[], None] = lambda: None,
    ) -> Record:
        """Move the files below `folder` and `attachments` into the store, then commit by writing the record.

        A kill at any instant leaves either no new record or a complete one. The files are moved, not copied: a stage
        that is killed during this computes its last step again from its checkpoint.

        Args:
            folder: deterministic files; their paths and contents are the artifact's digest.
            attachments: other files to keep with the record.
            record: `Record`'s remaining fields (stage, inputs, job, metrics, ...).
            before_commit: called just before the record is written; if it raises, no record is written.

        Raises:
            TetherError: `folder` holds no file, or holds a symbolic link; or the store cannot be written.
            UserError: its disk is full, or the store that `TETHER_STORE` names cannot be written.
        """
        try:
            make_folder(self.objects)
            with self.using():
                files = self.contents.take(folder)
                if not files:
                    raise TetherError(f"the stage {record.get('stage')} wrote no file into {folder}")
                attached = self.contents.take(attachments) if attachments is not None else {}
                digest = self.contents.write_manifest(files)
                fields = {**record, "key": key, "digest": digest, "files": files, "attachments": attached}
                return self.commit(Record.model_validate(fields), before_commit)
        except OSError as error:
            where = error.filename or self.place.where
            raise disk_error(error) or TetherError(f"the store can't be written: {error.strerror} ({where})") from error

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """Prevent garbage collection within the block, so that what is written here stays."""
        with self.local.using(), self.shared.using() if self.shared is not None else contextlib.nullcontext():
            yield

    def commit(self, record: Record, before: Callable[[], None] = lambda: None) -> Record:
        """Write a record under the next attempt's name. Its objects must be in the store, and uploaded if it is shared.

        The caller holds `using`. A record of another computer is never overwritten.
        """
        self.contents.upload(record.objects.values())
        before()
        attempt = max((number_of(name) for name in self.attempts(record.key)), default=0) + 1
        while True:
            written = record.model_copy(update={"attempt": attempt})
            suffix = "" if self.place.exclusive else f"-{uuid.uuid4().hex[:8]}"
            name = f"records/{record.key}/{attempt}{suffix}.{record.stage}.json"
            if self.place.create(name, record_text(written).encode()):
                return written
            attempt += 1

    def lookup(self, key: str, digest: str | None = None) -> Record | Miss:
        """Return the newest record of `key` (with artifact `digest`, if given) whose files all verify, else the reason.

        A record that was computed here comes before an imported one, even if that is newer.

        Raises:
            UserError: the store that `TETHER_STORE` names cannot be read.
        """
        reasons = []
        with self.local.using():
            attempts = [(number_of(name), self.read(key, name)) for name in self.attempts(key)]
            for number, record in sorted(attempts, key=lambda numbered: bool(getattr(numbered[1], "imported", ""))):
                if isinstance(record, Record):
                    if digest not in (None, record.digest):
                        continue
                    damage = self._damage(record.files, record.digest)
                    if damage is None:
                        self._warn_of_lost_attachments(record)
                        return record
                    record = Miss(damage)
                reasons.append(f"attempt {number}: {record.reason}")
        return Miss("; ".join(reasons) or "no record")

    def attempts(self, key: str) -> list[str]:
        """Return the names of the record files of `key`, newest first."""
        return attempts_of(entry.name for entry in self.place.entries(f"records/{key}"))

    def published(self, key: str) -> list[Record]:
        """Return every record of `key` that parses, newest first, imported ones last. Their files are not checked."""
        records = (self.read(key, name) for name in self.attempts(key))
        return sorted((r for r in records if isinstance(r, Record)), key=lambda r: bool(r.imported))

    def published_by(self, stage: str, newest: int = 20) -> list[Record]:
        """Return up to `newest` records of `stage`, newest first. Their files are not checked.

        Lists all records once, and reads only those whose file name has this stage.
        """
        by_key: dict[str, dict[str, float]] = defaultdict(dict)
        for entry in self.place.entries("records"):
            key, _, name = entry.name.partition("/")
            by_key[key][name] = entry.modified
        named = [
            (files[name], key, name)
            for key, files in by_key.items()
            for name in attempts_of(files)
            if (match := ATTEMPT.fullmatch(name)) and match[3] == stage
        ]
        newest_first = [(key, name) for _, key, name in sorted(named, reverse=True)]
        with ThreadPoolExecutor(8) as pool:  # behind a URL each read is a request
            read = list(pool.map(lambda file: self.read(*file), newest_first[:newest]))
        records = [record for record in read if isinstance(record, Record)]
        return sorted(records, key=lambda record: (record.started, record.attempt), reverse=True)

    def path(self, artifact: Record | str) -> Path:
        """Return a readable folder of an artifact, given its record or digest.

        Raises:
            TetherError: the store has no such artifact, its manifest or a file is damaged, or a link leads elsewhere.
        """
        digest = artifact if isinstance(artifact, str) else artifact.digest
        files = self.contents.manifest(digest)
        for name, sha in files.items():
            # A caller with a record got it by `lookup`, which has verified every file.
            if isinstance(artifact, str) or not (self.objects / sha).is_file():
                problem = self.contents.problem(sha)  # fetches it from a shared store
                if problem is not None:
                    raise TetherError(f"{name} of artifact {digest[:12]} is {problem} in {self.place.where}")
        if missing := view(self.views / digest, files, self.objects):
            raise TetherError(f"artifact {digest[:12]} lacks {missing} in {self.place.where}")
        return self.views / digest

    def attachment(self, record: Record, name: str) -> Path | None:
        """Return the file of one attachment; None if the record has none of that name or its object is lost."""
        return self._object(record.attachments.get(name))

    def file(self, record: Record, name: str) -> Path | None:
        """Return one file of the artifact likewise; its other files are not checked."""
        return self._object(record.files.get(name))

    def read(self, key: str, name: str, place: Place | None = None) -> Record | Miss:
        """Return the record in one of a key's files, or why it is invalid (`parse_record`). Objects are not checked."""
        try:
            text = (place or self.place).read(f"records/{key}/{name}").decode()
        except (OSError, UnicodeDecodeError) as error:
            return Miss(f"the record does not parse ({type(error).__name__})")
        return parse_record(text, key)

    def _object(self, sha: str | None) -> Path | None:
        return self.objects / sha if sha and self.contents.problem(sha) is None else None

    def _damage(self, files: Mapping[str, str], digest: str) -> str | None:
        for name, sha in {**files, "(manifest)": digest}.items():
            if problem := self.contents.problem(sha):
                return f"object {problem}: {name} ({sha[:12]})"
        return None

    def _warn_of_lost_attachments(self, record: Record) -> None:
        if lost := [name for name, sha in record.attachments.items() if self.contents.problem(sha)]:
            logger.warning("%s: attachments are missing or damaged (the artifact is whole): %s", record.stage, lost)


def digest_folder(folder: Path) -> str:
    """Return an artifact's digest computed from a plain folder: sha256 of canonical JSON `{relative path: sha256}`.

    Raises:
        UserError: as `files_read`, whose files it takes.
    """
    return digest_json({path.relative_to(folder).as_posix(): digest_file(path) for path in files_read(folder)})


def shared_place(home: Path) -> Place | None:
    """Return the place that `TETHER_STORE` names; None if it is unset or names the home's own store.

    Raises:
        UserError: it is a relative path, which would mean different stores in different working directories.
    """
    value = os.environ.get(VARIABLE, "").strip()
    if not value:
        return None
    place = place_at(value, VARIABLE)
    is_own = isinstance(place, FolderPlace) and place.root.resolve() == (home / "store").resolve()
    return None if is_own else place


def place_at(address: str, variable: str, **options: Any) -> Place:
    """Return the place at a folder or an fsspec URL, which `variable` names. `options` are fsspec's for the URL.

    Raises:
        UserError: it is a relative path.
    """
    if "://" in address and not address.startswith("file://"):
        from components.store.url import UrlPlace

        return UrlPlace(address, variable, **options)
    folder = user_path(address.removeprefix("file://"), variable)
    if not folder.is_absolute():
        raise UserError(f"{variable}={address}: give an absolute folder or a URL, as s3://bucket/prefix.")
    return FolderPlace(folder)
