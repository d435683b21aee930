"""Copying into a backup: each file is hashed as it is copied, and a person sees how far it is."""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from components.base.errors import naming
from components.base.files import make_folder, sync
from components.base.text import counted
from components.store.folder import open_regular
from components.store.place import Entry, Place
from components.store.records import ATTEMPT, SHA
from flows.stack.keeping.manifest import CHUNK, BackedUpFile
from tasks.execution.progress import StageProgress
from tasks.tracking.database import copy_database

T = TypeVar("T")

THREADS = 8
MOST_LISTINGS = 20
"""A store whose records change between two listings is listed again, so often at most."""


class Steps:
    """Goes through the items of one part after another; a bar on a terminal, lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def each(self, part: str, items: Collection[T]) -> Iterator[T]:
        """Give the items of a part, each shown as done when the next one is asked for."""
        if not items:
            return
        with StageProgress(self._console, part) as progress:
            for number, item in enumerate(items, 1):
                yield item
                progress.show({"step": number, "metrics": {}, "total": len(items)})

    def all(self, part: str, items: Collection[T], work: Callable[[T], object]) -> None:
        """Do the work of every item of a part, several at a time: disks and servers are waited for, not processors.

        Raises what the first one that fails raises, once those that were begun have ended.
        """
        if not items:
            return
        with StageProgress(self._console, part) as progress, ThreadPoolExecutor(THREADS) as pool:
            begun = [pool.submit(work, item) for item in items]
            try:
                for number, future in enumerate(as_completed(begun), 1):
                    future.result()
                    progress.show({"step": number, "metrics": {}, "total": len(items)})
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


class Copier:
    """Writes the files of a backup below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.files: dict[str, BackedUpFile] = {}
        """What was written."""
        self.unreadable: list[str] = []
        """What there was and could not be read: why, and which file."""

    def write(self, name: str, chunks: Iterable[bytes], mode: int = 0o600, modified: float | None = None) -> str:
        """Write a file piece by piece; returns its SHA-256.

        Args:
            name: relative to the backup's folder.
            chunks: its bytes.
            mode: the permissions that it had.
            modified: when it was written, in seconds since 1970; None: now.
        """
        path, digest, size = self._folder / name, hashlib.sha256(), 0
        make_folder(path.parent)
        with naming(path), path.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        when = time.time() if modified is None else modified
        self.files[name] = BackedUpFile(size=size, sha256=digest.hexdigest(), mode=mode, modified=when)
        return digest.hexdigest()

    def file(self, path: Path, name: str) -> None:
        """Copy a file as far as it is written; one that is gone by now is left out."""
        try:
            source = open_regular(path)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable.append(f"{path} ({error.strerror})")
            return
        with source:
            info = os.fstat(source.fileno())
            pieces = iter(lambda: source.read(CHUNK), b"")
            self.write(name, pieces, stat.S_IMODE(info.st_mode) & 0o777, info.st_mtime)

    def small(self, place: Place, name: str, to: str, modified: float) -> None:
        """Copy a small file of a store; likewise."""
        try:
            data = place.read(name)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable.append(f"{place.where}/{name} ({error.strerror})")
            return
        self.write(f"{to}/{name}", [data], 0o444, modified)

    def database(self, path: Path, name: str) -> None:
        """Copy a SQLite file, whole between two transactions."""
        draft = self._folder / f"{name}.draft"
        make_folder(draft.parent)
        copy_database(path, draft)
        self.file(draft, name)
        draft.unlink()

    def sync(self) -> None:
        """Have the disk keep the names of what was written."""
        for folder in {parent for name in self.files for parent in (self._folder / name).parents}:
            if folder.is_relative_to(self._folder):
                sync(folder)


def files_below(folder: Path, links: bool = False) -> dict[str, Path]:
    """Return the files below a folder by relative path, drafts of killed writers and links left out.

    With `links`, a link to a file counts as that file.
    """
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not (name.startswith(".") and name.endswith(".tmp"))]
        for path in (Path(parent, name) for name in names):
            if (links or not path.is_symlink()) and not (path.name.startswith(".") and path.name.endswith(".tmp")):
                found[path.relative_to(folder).as_posix()] = path
    return dict(sorted(found.items()))


def copy_store(
    place: Place, to: str, steps: Steps, copier: Copier, say: Callable[[str], object], without: Collection[str] = ()
) -> set[str]:
    """Copy a store whose collector is held off (`Place.using`): pins, then records, then objects. Returns the objects.

    A record is written after its objects and after the records that it was made from. So the records are listed until
    two listings agree: then whatever a listed record was made from is listed too. Objects come last: all of the copied
    records' are there by then.

    Args:
        place: the store.
        to: the folder in the backup.
        steps: shows the progress.
        copier: writes.
        say: is told of objects that are damaged in the store.
        without: objects that the backup has of another store.
    """
    pins = [each for each in place.entries("pins") if each.name.endswith(".json") and each.name[0] != "."]
    steps.all("pins", pins, lambda pin: copier.small(place, f"pins/{pin.name}", to, pin.modified))
    steps.all("records", _settled(place), lambda each: copier.small(place, f"records/{each[0]}", to, each[1]))
    objects = [each for each in place.entries("objects") if SHA.fullmatch(each.name)]
    damaged = []

    def copy(entry: Entry) -> None:
        name = f"objects/{entry.name}"
        if copier.write(f"{to}/{name}", place.chunks(name), 0o444, entry.modified) != entry.name:
            damaged.append(entry.name)

    steps.all("objects", [each for each in objects if each.name not in without], copy)
    if damaged:
        say(
            f"{counted(len(damaged), 'object is', 'objects are')} damaged in {place.where} and copied unchanged, the "
            "first is "
            f"{damaged[0][:12]}. `tether store verify` names them all; a run that needs one computes it again."
        )
    return {each.name for each in objects}


def _settled(place: Place) -> list[tuple[str, float]]:
    """Names of all records, and when they were written, the oldest first."""
    found: dict[str, float] | None = None
    for _ in range(MOST_LISTINGS):
        listed = {
            each.name: each.modified
            for each in place.entries("records")
            if ATTEMPT.fullmatch(each.name.rpartition("/")[2])
        }
        if found is not None and listed.keys() == found.keys():
            break
        found = listed
    return sorted((found or {}).items(), key=lambda each: (each[1], each[0]))
