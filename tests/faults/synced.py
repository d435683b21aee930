"""Watches that what gets a name below a home's store/, runs/ and work/ is on the disk before it does, the name after.

Planted by `inject.py` where its plan has `synced`: a file that takes a line for each rename or link that broke a rule.

- A file that is renamed or linked was synced since its last change; so was each file in a folder that is renamed.
- The folder that holds the new name is synced before its thread changes something elsewhere, or the process ends.
- Nothing below store/ and runs/ is written under its own name, but for what is only appended to.
"""

import atexit
import os
import re
import stat
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

WATCHED = ("store", "runs", "work")
APPENDED = re.compile(r"store/\.(views\.)?lock|runs/[^/]+/(mlflow\.lock|metrics/\w+\.jsonl|samples/\w+\.txt)")
"""What may be written under its own name: locks, which hold nothing, and points, whose reader expects a torn end."""


class Watch:
    """Patches `os` and listens to its audit events."""

    def __init__(self, log: str, home: str) -> None:
        self._log, self._home = log, home
        self._synced: dict[int, int] = {}
        """Inode to its size when it was synced."""
        self._unnamed: dict[int, dict[str, str]] = {}
        """Thread to folders with a new name that was not synced, and where that was given."""
        self._began = time.time_ns()
        self._busy = threading.local()
        for name in ("replace", "rename", "link"):
            setattr(os, name, self._naming(getattr(os, name)))
        os.fsync = self._syncing(os.fsync)
        sys.addaudithook(self._audit)
        atexit.register(self._end)

    def _syncing(self, fsync: Any) -> Any:
        def synced(descriptor: int) -> None:
            fsync(descriptor)
            info = os.fstat(descriptor)
            self._synced[info.st_ino] = info.st_size if stat.S_ISREG(info.st_mode) else -1
            self._unnamed.get(threading.get_ident(), {}).pop(os.readlink(f"/proc/self/fd/{descriptor}"), None)

        return synced

    def _naming(self, function: Any) -> Any:
        def named(source: Any, target: Any, **options: Any) -> None:
            path = os.path.abspath(os.fspath(target))
            if self._watched(path):
                self._elsewhere(path)
                for each in self._unsynced(Path(os.fspath(source))):
                    self._broken(f"{path}: {each} gets a name before it is synced")
            self._busy.naming = True
            try:
                function(source, target, **options)
            finally:
                self._busy.naming = False
            if self._watched(path):
                where = self._unnamed.setdefault(threading.get_ident(), {})
                where[os.path.realpath(os.path.dirname(path))] = f"{path}, {_caller()}"

        return named

    def _unsynced(self, source: Path) -> list[str]:
        """Files of this process that are published by renaming `source`, and aren't synced."""
        if source.is_symlink():
            return []
        paths = [source, *source.rglob("*")] if source.is_dir() else [source]
        infos = [(path, path.lstat()) for path in paths if not path.is_symlink()]
        found = []
        for path, info in infos:
            size = info.st_size if stat.S_ISREG(info.st_mode) else -1
            if self._synced.get(info.st_ino) != size and (info.st_mtime_ns >= self._began or path == source):
                found.append(path.name)
        # A folder that an earlier process left, and whose files it synced, is only moved.
        return [] if source.is_dir() and source.stat().st_mtime_ns < self._began else found

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.remove" and isinstance(arguments[0], str | os.PathLike):
            try:
                info = os.lstat(arguments[0])
                self._synced.pop(info.st_ino if info.st_nlink == 1 else -1, None)  # else it has another name yet
            except OSError:
                return
        if event not in ("open", "os.mkdir", "os.symlink") or getattr(self._busy, "naming", False):
            return
        where = arguments[1] if event == "os.symlink" else arguments[0]
        if not isinstance(where, str | os.PathLike) or (event == "open" and not writes(arguments)):
            return
        path = os.path.abspath(os.fspath(where))
        if not self._watched(path):
            return
        self._elsewhere(path)
        name = path[len(self._home) + 1 :]
        hidden = any(part.endswith(".tmp") for part in Path(name).parts)
        if event == "open" and not (name.startswith("work/") or hidden or APPENDED.fullmatch(name)):
            self._broken(f"{path} is written under its own name, {_caller()}")

    def _elsewhere(self, path: str) -> None:
        """A change at `path`: names that this thread has given in other folders must be synced by now."""
        unnamed = self._unnamed.get(threading.get_ident(), {})
        for folder in [each for each in unnamed if each != os.path.realpath(os.path.dirname(path))]:
            self._broken(f"the folder of {unnamed.pop(folder)} is not synced after it")

    def _watched(self, path: str) -> bool:
        return any(path.startswith(f"{self._home}/{top}/") for top in WATCHED)

    def _end(self) -> None:
        for unnamed in self._unnamed.values():
            for told in unnamed.values():
                self._broken(f"the folder of {told} is not synced after it")

    def _broken(self, told: str) -> None:
        with open(self._log, "a") as file:
            file.write(told + "\n")


def writes(arguments: tuple[Any, ...]) -> bool:
    """Whether the arguments of an `open` event open a file for writing."""
    mode, flags = arguments[1], arguments[2]
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def _caller() -> str:
    """The innermost line of ours, outside this file and `components/base/files.py`."""
    ours = [
        frame
        for frame in traceback.extract_stack()
        if re.search(r"/(components|tasks|flows|data_contracts)/", frame.filename)
        and not frame.filename.endswith("base/files.py")
    ]
    return f"{ours[-1].filename.rpartition('/')[2]}:{ours[-1].lineno}" if ours else "nothing of ours"
