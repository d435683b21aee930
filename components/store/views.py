"""Show an artifact as a folder of links to objects, made on request and repaired if it was changed."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path

from components.base.files import make_folder, sync
from components.store.leases import leased


def view(folder: Path, files: Mapping[str, str], objects: Path) -> list[str]:
    """Make `folder` the view of `files` (relative path to sha256; names checked), unless it is. Return missing objects.

    Missing objects are returned as the names of their files.
    """
    # All links are compared: a file added to the folder, or put in a link's place, would be read as the artifact's.
    # Links are relative, so that a home folder can be moved.
    wanted = {name: os.path.relpath(objects / sha, (folder / name).parent) for name, sha in files.items()}
    if _links(folder) != wanted:
        with alone(folder.parent):
            if _links(folder) != wanted:  # another process may have made it while we waited
                _link(folder, wanted)
    return [name for name in files if not (folder / name).is_file()]


def _links(folder: Path) -> dict[str, str | None]:
    """Return a view's entries: relative path to its link's target, None for what is not a link."""
    try:
        paths = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
        return {path.relative_to(folder).as_posix(): os.readlink(path) if path.is_symlink() else None for path in paths}
    except FileNotFoundError:  # it is being replaced just now
        return {}


def alone(views: Path) -> contextlib.AbstractContextManager[object]:
    """Prevent others from making or removing views within the block."""
    make_folder(views)
    return leased(views.parent / ".views.lock")


def _link(folder: Path, wanted: Mapping[str, str]) -> None:
    building = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    old = folder.with_name(f"{building.name}.old")
    try:
        for name, target in wanted.items():
            link = building / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(target)
        for directory in (building, *(path for path in building.rglob("*") if path.is_dir() and not path.is_symlink())):
            sync(directory)
        if folder.exists():
            folder.rename(old)
        building.rename(folder)
        sync(folder.parent)
    finally:
        for directory in (building, old):
            shutil.rmtree(directory, ignore_errors=True)
