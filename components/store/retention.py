"""Garbage collection: keep the records that runs, pins and models need, with everything upstream; remove the rest.

While a folder is collected nobody publishes or looks up there (`Place.collecting`), and what is needed is determined
within that time. A run writes the key that it wants into its status before it looks the key up. So it either finds the
record before the collection, which then sees that the run needs it, or looks afterwards and computes.
"""

import contextlib
import json
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.files import sweep
from components.store.place import Place
from components.store.records import ATTEMPT, KEY, Miss, Record, check_names
from components.store.store import ArtifactStore
from components.store.views import alone

YOUNG_SECONDS = 3600.0
"""Objects without a record, and partial files, are kept this long: a publisher that our lock does not reach may be
using them."""
UNLOCKED_SECONDS = 24 * 3600.0
"""Where there are no locks, all objects are kept this long after they were written: a publisher may be about to name
them in its record. If one is removed all the same, the look-up of that record says so, and it is computed again."""
WORK_SECONDS = 24 * 3600.0
"""A work folder that no kept run needs is kept this long after its last change."""

_TEMPORARY = re.compile(r"\..*\.tmp", re.DOTALL)

Requirements = Mapping[str, set[str]]
"""Maps an artifact's key or digest to the runs, pins and models that need it."""


class Stored(NamedTuple):
    """A record's file and its content."""

    place: Place
    key: str
    name: str
    size: int
    """Bytes of the file."""
    record: Record | Miss

    @property
    def path(self) -> str:
        return f"records/{self.key}/{self.name}"

    @property
    def identity(self) -> tuple[str, str]:
        return self.place.where, self.path


def stored(store: ArtifactStore, place: Place) -> list[Stored]:
    """Return every record's file of a place; files with other names are ignored.

    Raises:
        UserError: a record's name lacks the stage, as before release 0.1.0. What it needs is unknown.
    """
    named = [(*entry.name.partition("/")[::2], entry.size) for entry in place.entries("records")]
    if old := next((f"{key}/{name}" for key, name, _ in named if re.fullmatch(r"[0-9]+\.json", name)), ""):
        raise UserError(
            f"{place.where}/records/{old}: a version before release 0.1.0 wrote this record, so what it needs is "
            "unknown. Remove the file if no run needs it, or compute its run again and then remove it."
        )
    return [
        Stored(place, key, name, size, store.read(key, name, place))
        for key, name, size in named if ATTEMPT.fullmatch(name)
    ]  # fmt: skip


def kept_by(records: Iterable[Stored], requirements: Requirements) -> dict[tuple[str, str], set[str]]:
    """Return each needed record's identity with who needs it or something that was made from it."""
    by_digest: dict[str, list[Stored]] = defaultdict(list)
    named: list[tuple[Stored, str]] = []
    for entry in records:
        if isinstance(entry.record, Record):
            by_digest[entry.record.digest].append(entry)
            by = {*requirements.get(entry.key, ()), *requirements.get(entry.record.digest, ())}
            named += [(entry, who) for who in by]
    users: dict[tuple[str, str], set[str]] = defaultdict(set)
    while named:
        entry, who = named.pop()
        if who in users[entry.identity] or not isinstance(entry.record, Record):
            continue
        users[entry.identity].add(who)
        named += [(other, who) for digest in entry.record.inputs.values() for other in by_digest.get(digest, ())]
    return dict(users)


def write_pin(place: Place, run: str, needed: Iterable[str]) -> bool:
    """Pin what `run` needs, for every computer that shares the place; return False if it is pinned already."""
    check_names([run])
    return place.create(f"pins/{run}.json", json.dumps({"run": run, "needs": sorted(set(needed))}, indent=1).encode())


def remove_pin(place: Place, run: str) -> bool:
    """Undo `write_pin`; return False if the run was not pinned."""
    if run not in read_pins(place):
        return False
    place.remove(f"pins/{run}.json")
    return True


def read_pins(place: Place) -> dict[str, list[str]]:
    """Return each pinned run with the keys and digests that it needs.

    Raises:
        UserError: a pin cannot be read, so that what it keeps is unknown.
    """
    pins = {}
    for entry in place.entries("pins"):
        if not entry.name.endswith(".json") or entry.name.startswith("."):
            continue
        try:
            document = json.loads(place.read(f"pins/{entry.name}"))
            needed = [str(key) for key in document["needs"]]
            if not all(KEY.fullmatch(key) for key in needed):
                raise ValueError("it names something that is neither a key nor a digest")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{place.where}/pins/{entry.name} can't be read ({error}), so Tether does not know what it "
                f"keeps. Remove the file, then pin the run again."
            ) from error
        pins[entry.name.removesuffix(".json")] = needed
    return pins


class Gone(NamedTuple):
    """Something that is removed."""

    kind: str
    """record, object, leftover (of a killed writer), view or work."""
    name: str
    size: int
    """Bytes that it frees."""
    where: str
    """The place."""


def collect(
    store: ArtifactStore, requirements: Callable[[], Requirements], *, shared: bool = False, dry_run: bool = False
) -> list[Gone]:
    """Remove what nothing needs; return what was (or would be) removed.

    Args:
        requirements: returns what is needed; called once nobody publishes any more.
        shared: also collect the place that `TETHER_STORE` names. Otherwise only local copies of its objects go.
        dry_run: remove nothing.

    Raises:
        UserError: what is needed is unknown. Nothing was removed.
    """
    with contextlib.ExitStack() as stack:
        swept: list[Place] = [store.local, *([store.shared] if shared and store.shared is not None else [])]
        for place in swept:
            stack.enter_context(place.collecting())
        wanted = requirements()
        places = [place for place in (store.local, store.shared) if place is not None]
        records = [entry for place in places for entry in stored(store, place)]
        wanted_by = kept_by(records, wanted)
        remaining = [entry for entry in records if entry.identity in wanted_by]
        needless = [entry for entry in records if entry.identity not in wanted_by]
        # Records first: a kill midway then leaves objects without a record, but no record without its objects.
        gone = [Gone("record", r.path, r.size, p.where) for p in swept for r in needless if r.place is p]
        for place in swept:
            freed, young = (_objects(needless), YOUNG_SECONDS) if place.has_locks else (set[str](), UNLOCKED_SECONDS)
            gone += _objects_that_go(place, _objects(remaining), freed, time.time() - young)
            gone += _temporaries(place, time.time() - young)
        if not dry_run:
            sweep(store.home / "store")
            by_name = {place.where: place for place in swept}
            for entry in gone:
                by_name[entry.where].remove(entry.name)
        gone += _views(store, {entry.record.digest for entry in remaining if isinstance(entry.record, Record)}, dry_run)
        return gone + _work(store, wanted, {entry.key for entry in remaining}, dry_run)


def _objects(records: Iterable[Stored]) -> set[str]:
    return {sha for entry in records if isinstance(entry.record, Record) for sha in entry.record.objects.values()}


def _objects_that_go(place: Place, needed: set[str], freed: set[str], old: float) -> list[Gone]:
    return [
        Gone("object", f"objects/{entry.name}", entry.size, place.where)
        for entry in place.entries("objects")
        if entry.name not in needed and (entry.name in freed or entry.modified < old)
    ]


def _temporaries(place: Place, old: float) -> list[Gone]:
    """Return old temporary files of records and pins (`temporary_beside`), whichever machine wrote them."""
    return [
        Gone("leftover", f"{folder}/{entry.name}", entry.size, place.where)
        for folder in ("records", "pins")
        for entry in place.entries(folder)
        if _TEMPORARY.fullmatch(entry.name.rpartition("/")[2]) and entry.modified < old
    ]


def _views(store: ArtifactStore, digests: set[str], dry_run: bool) -> list[Gone]:
    gone = []
    with alone(store.views):
        for path in sorted(store.views.iterdir()):
            if path.name not in digests:
                gone.append(Gone("view", path.name, 0, str(store.views)))
                if not dry_run:
                    _remove_folder(path)
    return gone


def _work(store: ArtifactStore, requirements: Requirements, recorded: set[str], dry_run: bool) -> list[Gone]:
    """Remove work folders that no process holds and in which no kept run would continue."""
    gone = []
    for path in _work_folders(store):
        if path.name in requirements and path.name not in recorded:
            continue
        with store.if_free(path.name) as free:
            if not free or not path.is_dir():  # being computed, or finished meanwhile
                continue
            infos = [file.lstat() for file in (path, *path.rglob("*"))]
            if path.name not in recorded and max(info.st_mtime for info in infos) > time.time() - WORK_SECONDS:
                continue
            gone.append(Gone("work", path.name, sum(info.st_size for info in infos[1:]), str(store.work)))
            if not dry_run:
                _remove_folder(path)
    return gone


def remove_finished_work(store: ArtifactStore) -> None:
    """Remove work folders of keys that have a record: their process was killed between recording and cleaning up.

    A folder that changed after the record is kept: its stage is being computed again.

    Raises:
        UserError: the store that `TETHER_STORE` names cannot be read.
    """
    for path in _work_folders(store):
        # Without the temporary files of killed writers, which are not records.
        entries = store.place.entries(f"records/{path.name}")
        recorded = max((entry.modified for entry in entries if ATTEMPT.fullmatch(entry.name)), default=None)
        if recorded is None:
            continue
        with store.if_free(path.name) as free:
            if not free or not path.is_dir():
                continue
            changes = (file.lstat().st_mtime for file in path.rglob("*") if not file.is_dir())
            if recorded >= max(changes, default=0.0):
                shutil.rmtree(path)


def _work_folders(store: ArtifactStore) -> list[Path]:
    paths = sorted(store.work.iterdir()) if store.work.is_dir() else []
    return [path for path in paths if KEY.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _remove_folder(path: Path) -> None:
    """Remove a folder, or a link without following it."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
