"""Copy files into a backup: each file is hashed while it is copied, and the progress is shown."""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from components.base.errors import naming
from components.base.files import make_folder
from components.base.paths import open_regular
from components.base.text import counted
from components.store.place import Entry, Place
from components.store.records import ATTEMPT, SHA
from flows.keeping.manifest import CHUNK, BackedUpFile
from tasks.execution.stage_progress import StageProgress
from tasks.tracking.database import copy_database

T = TypeVar("T")

THREADS = 8
MOST_LISTINGS = 20
"""A store whose records change between two listings is listed again, at most this often."""


class Steps:
    """Processes the items of one part after another part, with a progress bar on a terminal and lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def all(self, part: str, items: Collection[T], work: Callable[[T], object], at_once: int = THREADS) -> None:
        """Call `work` for every item of a part, several `at_once`, because it waits for disks and servers.

        The first exception is raised again once the calls in progress have ended.
        """
        if not items:
            return
        with StageProgress(self._console, part) as progress, ThreadPoolExecutor(at_once) as pool:
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
        """The files written so far, by name."""
        self.unreadable: list[str] = []
        """Files that exist but could not be read, each with the reason."""

    def write(self, name: str, chunks: Iterable[bytes], mode: int = 0o600, modified: float | None = None) -> str:
        """Write a file from `chunks` and return its SHA-256.

        Args:
            name: the path relative to the backup's folder.
            chunks: its bytes.
            mode: the permissions to record in the manifest.
            modified: the time to record, in seconds since 1970; None: now.
        """
        path, digest, size = self._folder / name, hashlib.sha256(), 0
        make_folder(path.parent)
        with naming(path), path.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)
            for chunk in chunks:
                digest.update(chunk)
                size += len(chunk)
                file.write(chunk)
        when = time.time() if modified is None else modified
        self.files[name] = BackedUpFile(size=size, sha256=digest.hexdigest(), mode=mode, modified=when)
        return digest.hexdigest()

    def file(self, path: Path, name: str) -> None:
        """Copy a file's current content; a file that no longer exists is left out."""
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
        """Copy a small file of a store as `file` does."""
        try:
            data = place.read(name)
        except FileNotFoundError:
            return
        except OSError as error:
            self.unreadable.append(f"{place.where}/{name} ({error.strerror})")
            return
        self.write(f"{to}/{name}", [data], 0o444, modified)

    def database(self, path: Path, name: str) -> None:
        """Copy a SQLite file as of a moment between two transactions."""
        draft = self._folder / f"{name}.draft"
        make_folder(draft.parent)
        copy_database(path, draft)
        self.file(draft, name)
        draft.unlink()


def files_below(folder: Path, links: bool = False) -> dict[str, Path]:
    """Return the files below a folder by relative path, without links and the drafts of killed writers.

    With `links`, a link to a file is included like a file.
    """
    files = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not (name.startswith(".") and name.endswith(".tmp"))]
        for path in (Path(parent, name) for name in names):
            if (links or not path.is_symlink()) and not (path.name.startswith(".") and path.name.endswith(".tmp")):
                files[path.relative_to(folder).as_posix()] = path
    return dict(sorted(files.items()))


def copy_store(
    place: Place, to: str, steps: Steps, copier: Copier, say: Callable[[str], object], without: Collection[str] = ()
) -> set[str]:
    """Copy a store and return its objects' names: pins, then records, then objects.

    The store's collector must be held off (`Place.using`). A record is written after its objects and after the records
    it was made from. The records are listed until two listings agree, so every record that a listed one was made from
    is listed too. Objects are copied last: by then all objects of the copied records exist.

    Args:
        place: the store.
        to: the folder in the backup.
        steps: shows the progress.
        copier: writes the files.
        say: gets a line if objects are damaged in the store.
        without: objects that the backup already has from another store.
    """
    pins = [pin for pin in place.entries("pins") if pin.name.endswith(".json") and pin.name[0] != "."]
    steps.all("pins", pins, lambda pin: copier.small(place, f"pins/{pin.name}", to, pin.modified))
    steps.all("records", _settled(place), lambda record: copier.small(place, f"records/{record[0]}", to, record[1]))
    objects = [entry for entry in place.entries("objects") if SHA.fullmatch(entry.name)]
    damaged = []

    def copy(entry: Entry) -> None:
        name = f"objects/{entry.name}"
        if copier.write(f"{to}/{name}", place.chunks(name), 0o444, entry.modified) != entry.name:
            damaged.append(entry.name)

    steps.all("objects", [entry for entry in objects if entry.name not in without], copy)
    if damaged:
        say(
            f"{counted(len(damaged), 'object is', 'objects are')} damaged in {place.where} and copied unchanged, the "
            "first is "
            f"{damaged[0][:12]}. `tether store verify` lists them all; a run that needs one computes it again."
        )
    return {entry.name for entry in objects}


def _settled(place: Place) -> list[tuple[str, float]]:
    """Return the names of all records and the times they were written, oldest first."""
    before: dict[str, float] | None = None
    for _ in range(MOST_LISTINGS):
        listed = {
            entry.name: entry.modified
            for entry in place.entries("records")
            if ATTEMPT.fullmatch(entry.name.rpartition("/")[2])
        }
        if before is not None and listed.keys() == before.keys():
            break
        before = listed
    return sorted((before or {}).items(), key=lambda item: (item[1], item[0]))
