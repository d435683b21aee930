"""Results as one file: an uncompressed tar of records and their objects.

The same records give the same bytes: members are sorted, without times, owners or attempt numbers. A reader checks
every name and every sha256 before it writes anything. These checks don't show who made the archive, so a record from
one is marked as imported.
"""

import hashlib
import io
import json
import math
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from components.base.errors import TetherError, UserError
from components.base.files import make_folder, replacing, sweep_drafts
from components.base.hashing import digest_json
from components.base.paths import open_regular
from components.base.strict_json import DEEPEST, TOO_DEEP, depth_of
from components.store.records import SHA, STAGE, Miss, Record, check_names, parse_record, record_text
from components.store.store import ArtifactStore

RUN = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
"""A valid run id in an archive."""
LARGEST = {
    re.compile(rf"run/(run\.json|config\.yaml|metrics/{STAGE.pattern}\.jsonl)"): None,  # earlier versions; not used
    re.compile(rf"records/{SHA.pattern}/1\.json"): 16 << 20,
    re.compile(rf"objects/{SHA.pattern}"): None,
}
"""The kinds of members that an archive may hold, with each kind's largest size in bytes; None: not read into memory."""
MOST = 256 << 20
"""Most bytes that are read into memory in all."""
MOST_MEMBERS = 200_000
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """An archive that was read completely and passed every check."""

    path: Path
    records: list[Record]
    objects: Mapping[str, tuple[int, int]]
    """Maps each object's sha256 to its offset and length in the file, in bytes."""

    def chunks(self, sha: str) -> Iterator[bytes]:
        begin, size = self.objects[sha]
        with open_regular(self.path) as file:
            file.seek(begin)
            yield from _chunks(file, size)


def write_archive(target: Path, store: ArtifactStore, records: Iterable[Record]) -> None:
    """Write `records` with their objects into a tar, atomically.

    Raises:
        TetherError: an object of a record is missing or damaged.
    """
    numbered = sorted(map(_as_exported, records), key=lambda record: record.key)
    small = {f"records/{record.key}/1.json": record_text(record).encode() for record in numbered}
    objects = {sha: (record, name) for record in numbered for name, sha in record.objects.items()}
    sweep_drafts(target.absolute())
    with replacing(target) as temporary, tarfile.open(temporary, "w:", format=tarfile.GNU_FORMAT) as tar:
        for name, data in sorted(small.items()):
            tar.addfile(_member(name, len(data)), io.BytesIO(data))
        for sha, (record, name) in sorted(objects.items()):
            if problem := store.contents.problem(sha):
                raise TetherError(
                    f"{name} of {record.stage} is {problem} in {store.place.where} ({sha[:12]}). Run the same "
                    f"command again to compute it, then export."
                )
            with (store.objects / sha).open("rb") as file:
                tar.addfile(_member(f"objects/{sha}", (store.objects / sha).stat().st_size), file)


def read_archive(path: Path) -> Archive:
    """Read and check a whole archive. Nothing is written.

    Raises:
        UserError: it cannot be read, or holds something that our export never writes; nothing of it is then used.
    """
    try:
        with open_regular(path) as file:
            return _read(path, file)
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} can't be read as an export ({type(error).__name__}: {error}), and nothing of it was written. Give "
            f"a file that `tether store export` wrote, uncompressed."
        ) from error
    except TetherError as error:
        raise UserError(
            f"{path} is refused, and nothing of it was written: {error}. Ask who sent it to export the run again, "
            f"and check that the file arrives unchanged."
        ) from error


def admit(archive: Archive, store: ArtifactStore) -> list[Record]:
    """Put an archive's objects and records into the store, next to those that are there. Return the new records.

    New records are marked as imported: `ArtifactStore.lookup` prefers a record that was computed here.

    Raises:
        UserError: the file changed since it was read.
    """
    new = []
    make_folder(store.objects)
    with store.using():
        for sha in archive.objects:
            if store.contents.problem(sha) is not None and not store.contents.receive(sha, archive.chunks(sha)):
                raise UserError(f"{archive.path} changed while it was read; import it again.")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for record in archive.records:
            if not any(_same(record, other) for other in store.published(record.key)):
                new.append(store.commit(record.model_copy(update={"imported": now})))
    return new


def _as_exported(record: Record) -> Record:
    return record.model_copy(update={"attempt": 1, "imported": ""})


def _same(one: Record, other: Record) -> bool:
    """Return whether two records are equal except for the attempt. Compared as text, since NaN is not equal to NaN."""
    return record_text(_as_exported(one)) == record_text(_as_exported(other))


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)  # time, owner and group are zero
    member.size, member.mode = size, 0o644
    return member


def _read(path: Path, file: BinaryIO) -> Archive:
    members = list(_members(file))  # all headers first: contents take long to read
    records: dict[str, Record] = {}
    objects: dict[str, tuple[int, int]] = {}
    for member, begin in members:
        file.seek(begin)
        folder, _, rest = member.name.partition("/")
        if folder == "run":
            continue
        if folder == "objects":
            digest = hashlib.sha256()
            for chunk in _chunks(file, member.size):
                digest.update(chunk)
            if digest.hexdigest() != rest:
                raise TetherError(f"the object {rest[:12]} is damaged (its sha256 is {digest.hexdigest()[:12]})")
            objects[rest] = (begin, member.size)
            continue
        key = rest.partition("/")[0]
        records[key] = _record(member.name, b"".join(_chunks(file, member.size)), key)
    if not records:
        raise TetherError("it has no record")
    _check_complete(records.values(), objects)
    return Archive(path, list(records.values()), objects)


def _members(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield each member with the offset of its bytes, if an export may hold such a member.

    The headers are read one by one, since `tarfile` would read an extended header of any claimed size into memory. Our
    exports have no extended headers.
    """
    end = file.seek(0, io.SEEK_END)
    begin, seen, in_memory = 0, set[str](), 0
    while True:
        file.seek(begin)
        block = file.read(tarfile.BLOCKSIZE)
        if block == bytes(tarfile.BLOCKSIZE):
            break
        member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        begin += tarfile.BLOCKSIZE
        in_memory += _check(member, seen, end - begin)
        if in_memory > MOST or len(seen) > MOST_MEMBERS:
            raise TetherError(f"it holds over {MOST} bytes beside its objects, or over {MOST_MEMBERS} members")
        yield member, begin
        begin += -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
    rest = file.read(tarfile.RECORDSIZE + 1)
    if len(rest) > tarfile.RECORDSIZE or rest.strip(b"\0"):
        raise TetherError("there are data after its end")


def _check(member: tarfile.TarInfo, seen: set[str], left: int) -> int:
    """Check that an export may hold this member and that the file is long enough; return how many bytes to read."""
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise TetherError(f"{member.name!r} is not a regular file")
    check_names([member.name])
    largest = next((size for name, size in LARGEST.items() if name.fullmatch(member.name)), -1)
    if largest == -1:
        raise TetherError(f"{member.name!r} is not part of an export of this version")
    if member.name in seen:
        raise TetherError(f"{member.name!r} is in it more than once")
    if not 0 <= member.size <= left:
        raise TetherError(f"{member.name!r} claims {member.size} bytes, and {left} are left in the file")
    if largest is not None and member.size > largest:
        raise TetherError(f"{member.name!r} has {member.size} bytes, more than the {largest} that it may have")
    seen.add(member.name)
    return 0 if largest is None else member.size


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while size > 0 and (data := file.read(min(size, _CHUNK))):
        size -= len(data)
        yield data


def _record(name: str, data: bytes, key: str) -> Record:
    try:
        text = data.decode()
        if depth_of(json.loads(text)) > DEEPEST:
            raise ValueError(TOO_DEEP)
    except (ValueError, RecursionError) as error:
        raise TetherError(f"{name}: the record does not parse ({error})") from error
    record = parse_record(text, key)
    if isinstance(record, Miss):
        raise TetherError(f"{name}: {record.reason}")
    if digest_json(record.parts) != key:
        raise TetherError(f"{name}: the key is not the digest of its parts")
    fields = {"stage": record.stage, "job": record.job, "inputs": record.inputs}
    if differing := [part for part, value in fields.items() if record.parts.get(part, type(value)()) != value]:
        raise TetherError(f"{name}: {' and '.join(differing)} is not what its key was computed from")
    if not STAGE.fullmatch(record.stage):
        raise TetherError(f"{name}: the stage {record.stage!r} is not a stage's name")
    if strange := [digest for digest in record.inputs.values() if not SHA.fullmatch(digest)]:
        raise TetherError(f"{name}: the input {strange[0]!r} is not a sha256")
    if record.imported or record.attempt != 1 or (record.run and not RUN.fullmatch(record.run)):
        raise TetherError(f"{name}: run, attempt or imported is not what an export has (or it is not a run's id)")
    if not (math.isfinite(record.seconds) and record.seconds >= 0):
        raise TetherError(f"{name}: it took {record.seconds} seconds")
    return record


def _check_complete(records: Iterable[Record], objects: Mapping[str, object]) -> None:
    strangers = set(objects)
    for record in records:
        for name, sha in record.objects.items():
            if sha not in objects:
                raise TetherError(f"{record.stage}: {name} is not in it ({sha[:12]})")
            strangers.discard(sha)
    if strangers:
        raise TetherError(f"no record names the object {min(strangers)[:12]}")
