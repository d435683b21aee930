"""Files and folders that are whole or not there."""

import contextlib
import errno
import fnmatch
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.base.errors import naming
from components.base.process import is_dead_mark, process_mark


def temporary_beside(path: Path) -> Path:
    """A name for what is to become `path`. It says which process writes it, for `sweep` to know when that is dead."""
    return path.with_name(f".{path.name}.{process_mark()}.{uuid.uuid4().hex[:8]}.tmp")


def sweep(folder: Path) -> None:
    """Remove what processes of this machine that were killed left unfinished below `folder`."""
    for parent, folders, files in os.walk(folder):  # which, unlike rglob, passes over what others remove meanwhile
        for name in fnmatch.filter([*folders, *files], ".*.tmp"):
            _remove_if_dead(Path(parent, name))


def sweep_drafts(path: Path) -> None:
    """Remove what killed processes left of `path` beside it; what else lies there is not looked at."""
    for name in fnmatch.filter(os.listdir(path.parent), ".*.tmp"):
        if name.startswith(f".{path.name}."):
            _remove_if_dead(path.with_name(name))


def _remove_if_dead(path: Path) -> None:
    mark = path.name.rpartition(".tmp")[0].rpartition(".")[0].rpartition(".")[2]
    if is_dead_mark(mark):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; what is written there is synced to disk and renamed to `path`, and that too."""
    temporary = temporary_beside(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old content or the new, whole, even after a power failure.

    Raises:
        OSError: the disk is full or can't be written; the old content is still there. UnicodeEncodeError: a text that
            UTF-8 can't hold.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def make_folder(folder: Path, mode: int | None = None) -> None:
    """Make a folder and those above it, unless they are there, and sync their names to disk.

    `mode` is the permissions of the new ones; None leaves them to the umask.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    folder.mkdir(exist_ok=True)
    if mode is not None:
        with contextlib.suppress(PermissionError):  # another user has made it meanwhile
            folder.chmod(mode)
    sync(folder.parent)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; the files written into it are synced to disk and it is renamed to `path`.

    Raises:
        OSError: at the end, where `path` is there and isn't an empty folder.
    """
    temporary = temporary_beside(path)
    make_folder(path.parent)
    sweep_drafts(path)
    temporary.mkdir()
    try:
        with naming(path):
            yield temporary
            for each in (*temporary.rglob("*"), temporary):
                sync(each)
            os.rename(temporary, path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def seal(value: Any) -> str:
    """`value` as JSON under its own sha256, one line each, for `read_sealed`. NaN and infinity are kept.

    Raises:
        TypeError: `value` holds what JSON cannot.
    """
    text = json.dumps(value) + "\n"
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_sealed(path: Path) -> Any:
    """The value of a file that `seal` made.

    Raises:
        OSError: it can't be read. ValueError: it isn't as it was written.
    """
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{path.name} is damaged: its content does not match the sha256 in its first line")
    return json.loads(text)


def sync(path: Path) -> None:
    """Have the disk keep what a file or folder holds.

    A folder that may be used but not listed, or whose file system syncs none, is left to the system.
    """
    try:
        with naming(path):
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
            raise
