"""Files and folders that are whole or not there."""

import contextlib
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
            path, mark = Path(parent, name), name.rpartition(".tmp")[0].rpartition(".")[0].rpartition(".")[2]
            if is_dead_mark(mark):
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path`; what is written there is synced to disk and renamed to `path`."""
    temporary = temporary_beside(path)
    try:
        with naming(path):
            yield temporary
            sync(temporary)
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`; the files written into it are synced to disk and it is renamed to `path`.

    Raises:
        OSError: at the end, where `path` is there and isn't an empty folder.
    """
    temporary = temporary_beside(path)
    temporary.mkdir(parents=True)
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
        raise ValueError(f"{path.name} is damaged: its own sha256 does not hold")
    return json.loads(text)


def sync(path: Path) -> None:
    """Have the disk keep what a file or folder holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
