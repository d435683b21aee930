"""Write files and folders atomically: a reader finds all of the new content, or none of it."""

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
    """Return a temporary name beside `path`. It names the writing process, so that `sweep` can tell when that died."""
    return path.with_name(f".{path.name}.{process_mark()}.{uuid.uuid4().hex[:8]}.tmp")


def sweep(folder: Path) -> None:
    """Remove the temporary files below `folder` whose processes, on this machine, were killed."""
    for parent, folders, files in os.walk(folder):  # unlike rglob, ignores what others remove meanwhile
        for name in fnmatch.filter([*folders, *files], ".*.tmp"):
            _remove_if_dead(Path(parent, name))


def sweep_drafts(path: Path) -> None:
    """Remove the temporary files beside `path` that killed writers of `path` left; other files are not touched."""
    for name in fnmatch.filter(os.listdir(path.parent), ".*.tmp"):
        if name.startswith(f".{path.name}."):
            _remove_if_dead(path.with_name(name))


def _remove_if_dead(path: Path) -> None:
    mark = path.name.rpartition(".tmp")[0].rpartition(".")[0].rpartition(".")[2]
    if is_dead_mark(mark):
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`. At the end its file is synced, renamed to `path`, and the rename synced."""
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
    """Write a file atomically: a reader finds all of the old content or all of the new, even after a power failure.

    Raises:
        OSError: the disk is full or can't be written; the old content is still there. UnicodeEncodeError: a text that
            UTF-8 can't hold.
    """
    data = content.encode() if isinstance(content, str) else content
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def make_folder(folder: Path, mode: int | None = None) -> None:
    """Make a folder and its missing parents, and sync their names to disk.

    `mode` is the permissions of the new ones; None leaves them to the umask.

    Raises:
        NotADirectoryError: a file is where one of them must be.
    """
    if folder.is_dir():
        return
    make_folder(folder.parent, mode)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError as error:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from error
    if mode is not None:
        with contextlib.suppress(PermissionError):  # another user has made it meanwhile
            folder.chmod(mode)
    sync(folder.parent)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `path`. At the end its files are synced to disk and it is renamed to `path`.

    Raises:
        OSError: at the end, if `path` exists and is not an empty folder.
    """
    temporary = temporary_beside(path)
    make_folder(path.parent)
    sweep_drafts(path)
    temporary.mkdir()
    try:
        with naming(path):
            yield temporary
            for part in (*temporary.rglob("*"), temporary):
                sync(part)
            os.rename(temporary, path)
            sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def with_digest(value: Any) -> str:
    """Return two lines, the sha256 of `value` as JSON and that JSON, for `read_with_digest`. NaN and infinity are kept.

    Raises:
        TypeError: `value` holds what JSON cannot.
    """
    text = json.dumps(value) + "\n"
    return f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"


def read_with_digest(path: Path) -> Any:
    """Return the value in a file that holds what `with_digest` returned.

    Raises:
        OSError: the file cannot be read. ValueError: its content does not match its sha256.
    """
    digest, _, text = path.read_text(encoding="utf-8").partition("\n")
    if hashlib.sha256(text.encode()).hexdigest() != digest:
        raise ValueError(f"{path.name} is damaged: its content does not match the sha256 in its first line")
    return json.loads(text)


def sync(path: Path) -> None:
    """Sync a file or folder to disk.

    Does nothing for a folder that this user may not list, or whose file system cannot sync folders.
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
