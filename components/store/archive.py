"""A run as one file: an uncompressed tar of its own files, the records it rests on, and their objects.

The same run gives the same bytes: members are sorted, without times, owners or attempt numbers. A reader believes
nothing of it before every name and every sha256 was checked, and writes nothing before that.
"""

import hashlib
import io
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from components.base.errors import TetherError, UserError
from components.base.files import make_folder, replacing, sweep_drafts
from components.store.records import ATTEMPT, KEY, SHA, Miss, Record, check_names, parse_record, record_text
from components.store.store import ArtifactStore

MEMBER = re.compile(rf"run/[\w.-]+(/[\w.-]+)?|records/{KEY.pattern}/{ATTEMPT.pattern}|objects/{SHA.pattern}", re.ASCII)
SMALL = 64 << 20
"""Bytes of the largest member that is no object; it is read into memory."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """An archive that was read through and holds."""

    path: Path
    files: Mapping[str, bytes]
    """The run's own files: relative path to bytes."""
    records: list[Record]
    objects: list[str]
    """sha256 of each."""

    def chunks(self, sha: str) -> Iterator[bytes]:
        """An object's bytes."""
        with tarfile.open(self.path, "r:") as tar:
            file = tar.extractfile(f"objects/{sha}")
            assert file is not None
            while data := file.read(_CHUNK):
                yield data


def write_archive(target: Path, store: ArtifactStore, files: Mapping[str, bytes], records: Iterable[Record]) -> None:
    """Write `files` (a run's own) and `records` with their objects into a tar, whole or not at all.

    Raises:
        TetherError: an object of a record is missing or damaged.
    """
    numbered = sorted((record.model_copy(update={"attempt": 1}) for record in records), key=lambda record: record.key)
    small = {f"run/{name}": data for name, data in files.items()}
    small |= {f"records/{record.key}/1.json": record_text(record).encode() for record in numbered}
    objects = {sha: (record, name) for record in numbered for name, sha in record.objects.items()}
    sweep_drafts(target.absolute())
    with replacing(target) as temporary, tarfile.open(temporary, "w:", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(small.items()):
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
        for sha, (record, name) in sorted(objects.items()):
            if problem := store.contents.problem(sha):
                raise TetherError(
                    f"{name} of {record.stage} is {problem} in {store.place.where} ({sha[:12]}). Run the same run "
                    f"again, which computes it, then export."
                )
            with (store.objects / sha).open("rb") as file:
                tar.addfile(_member(f"objects/{sha}", (store.objects / sha).stat().st_size), file)


def read_archive(path: Path) -> Archive:
    """Read an archive through, and believe it only if everything holds. Nothing is written.

    Raises:
        UserError: it can't be read, or holds what no export of ours does: then nothing of it is to be trusted.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            return _read(path, tar)
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read as an export ({type(error).__name__}: {error}).") from error
    except TetherError as error:
        raise UserError(f"{path} is refused, and nothing of it was written: {error}.") from error


def admit(archive: Archive, store: ArtifactStore) -> list[Record]:
    """Put an archive's objects and records into the store; what is there stays. Returns the records that are new.

    Raises:
        UserError: the file changed since it was read.
    """
    new = []
    make_folder(store.objects)
    with store.using():
        for sha in archive.objects:
            if store.contents.problem(sha) is not None and not store.contents.receive(sha, archive.chunks(sha)):
                raise UserError(f"{archive.path} changed while it was read; import it again.")
        for record in archive.records:
            if isinstance(store.lookup(record.key), Miss) or not any(
                _same(record, other) for other in store.published(record.key)
            ):
                new.append(store.commit(record))
    return new


def _same(one: Record, other: Record) -> bool:
    """Whether two records say the same, whichever attempt each is (as text: NaN isn't equal to itself)."""
    return record_text(one.model_copy(update={"attempt": 1})) == record_text(other.model_copy(update={"attempt": 1}))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # time, owner and group are zero
    member.size, member.mode = size, 0o644
    return member


def _read(path: Path, tar: tarfile.TarFile) -> Archive:
    files: dict[str, bytes] = {}
    records: dict[str, Record] = {}
    objects: dict[str, None] = {}
    seen: set[str] = set()
    for member in tar:
        _check(member, seen)
        folder, _, rest = member.name.partition("/")
        content = tar.extractfile(member)
        assert isinstance(content, io.BufferedReader)
        if folder == "objects":
            if (digest := hashlib.file_digest(content, "sha256").hexdigest()) != rest:
                raise TetherError(f"the object {rest[:12]} is damaged (its sha256 is {digest[:12]})")
            objects[rest] = None
        elif folder == "run":
            files[rest] = content.read()
        else:
            key = rest.partition("/")[0]
            record = parse_record(content.read().decode(), key)
            if isinstance(record, Miss) or key in records:
                raise TetherError(f"{member.name}: {record.reason if isinstance(record, Miss) else 'a second record'}")
            records[key] = record
    if not seen:
        raise TetherError("it is empty")
    _check_complete(records.values(), objects)
    return Archive(path, files, list(records.values()), list(objects))


def _check(member: tarfile.TarInfo, seen: set[str]) -> None:
    check_names([member.name])
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
        raise TetherError(f"{member.name!r} is no plain file")
    if not MEMBER.fullmatch(member.name):
        raise TetherError(f"{member.name!r} is nothing that an export holds")
    if member.name in seen:
        raise TetherError(f"{member.name!r} is in it twice")
    if member.size > SMALL and not member.name.startswith("objects/"):
        raise TetherError(f"{member.name!r} has {member.size} bytes")
    seen.add(member.name)


def _check_complete(records: Iterable[Record], objects: Mapping[str, None]) -> None:
    strangers = set(objects)
    for record in records:
        for name, sha in record.objects.items():
            if sha not in objects:
                raise TetherError(f"{record.stage}: {name} is not in it ({sha[:12]})")
            strangers.discard(sha)
    if strangers:
        raise TetherError(f"no record names the object {min(strangers)[:12]}")
