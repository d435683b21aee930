"""`tether restore`: turn a backup into a home again, completely or not at all.

Everything is written into a folder next to the home, and each file is compared with the manifest while it is copied. At
the end the folder is renamed to the home. A stack in another folder is renamed just before. If the restore is killed
between the two, the same command continues it.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from components.base.errors import UserError
from components.base.files import make_folder, whole_folder
from components.store.place import VARIABLE, Place
from components.store.store import shared_place
from flows.stack.config import Stack
from flows.stack.keeping import servers
from flows.stack.keeping.copying import Steps
from flows.stack.keeping.manifest import MANIFEST, Manifest, checked, read_manifest
from tasks.runs.schema import HOME_SCHEMA, newer
from tasks.runs.status import RUN_FILE, end_elsewhere
from tasks.tracking.database import move_artifacts

Say = Callable[[str], object]

RESTORED = "restored.json"
"""A file in a restored stack's folder that identifies the backup it came from."""


def restore(source: Path, home: Path, stack: Stack, steps: Steps, say: Say) -> Manifest:
    """Restore a home, and its stack if it had one, from a backup, and return the backup's manifest.

    Args:
        source: the backup's folder.
        home: the Tether home to create; it must be empty or missing.
        stack: this machine's stack, from its config.
        steps: shows the progress.
        say: gets lines for a person.

    Raises:
        UserError: the folder is not a backup, one of its files is damaged, or the home is not empty; nothing was
            changed.
        TetherError: a server of the stack fails.
    """
    manifest = read_manifest(source)
    if manifest.home_schema is not None and manifest.home_schema > HOME_SCHEMA:
        raise newer(source / MANIFEST, "home", manifest.home_schema, HOME_SCHEMA)
    shared = _check(manifest, source, home, stack)

    def put(name: str, path: Path) -> None:
        _write(source, name, manifest, path)

    inside = stack.folder.is_relative_to(home)
    stacked = manifest.stack is not None and not _is_of(stack.folder, manifest)
    with whole_folder(home) as staging:
        _verify(source, manifest, steps)
        steps.all("home", manifest.below("home"), lambda name: put(f"home/{name}", staging / name))
        _settle(staging, manifest, home)
        if stacked and inside:
            _stack(staging, manifest, stack, staging / stack.folder.relative_to(home), steps, put)
        elif stacked:
            with whole_folder(stack.folder) as folder:
                folder.chmod(0o755)  # PostgreSQL's user must be able to pass through it
                _stack(staging, manifest, stack, folder, steps, put)
        if shared is not None:
            with shared.using():
                servers.fill(shared, manifest, "shared", steps, put, staging)
    if manifest.home != str(home):
        say(
            f"The home was {manifest.home} and is now {home}. Files outside the home that runs name by path stay where "
            "they are."
        )
    return manifest


def _check(manifest: Manifest, source: Path, home: Path, stack: Stack) -> Place | None:
    """Refuse if a folder is in the way. Return the store at `TETHER_STORE` that is to be filled, if the backup has
    one."""
    way_out = "Move it away, or set TETHER_HOME to a folder that does not exist yet."
    if home.is_symlink() or (home.exists() and not home.is_dir()):
        raise UserError(f"restore: {home} exists and is not a folder. {way_out}")
    if home.is_dir() and any(home.iterdir()):
        raise UserError(f"restore: {home} is not empty, and a restore overwrites nothing. {way_out}")
    if source.resolve().is_relative_to(home.resolve()):
        raise UserError(f"restore: {source} is inside {home}. Move the backup elsewhere first.")
    folder = stack.folder
    if manifest.stack is not None and folder.is_dir() and any(folder.iterdir()) and not _is_of(folder, manifest):
        raise UserError(
            f"restore: {folder} is not empty, and the backup has a stack. Run `tether stack down` if it is running, "
            f"then move the folder away, or set folder in the stack's config."
        )
    shared = shared_place(home) if manifest.shared else None
    if manifest.shared and shared is None:
        raise UserError(
            f"restore: the backup includes the store that {VARIABLE} named, {manifest.shared}. Set {VARIABLE} to the "
            f"folder or bucket to restore it to."
        )
    return shared


def _verify(source: Path, manifest: Manifest, steps: Steps) -> None:
    """Read and verify the whole backup before anything is written."""

    def read(name: str) -> None:
        for _ in checked(source, name, manifest.files[name]):
            pass

    steps.all("verifying", manifest.files, read)


def _write(source: Path, name: str, manifest: Manifest, path: Path) -> None:
    file = manifest.files[name]
    make_folder(path.parent)
    with path.open("wb") as target:
        os.fchmod(target.fileno(), 0o600)
        for data in checked(source, name, file):
            target.write(data)
    os.utime(path, (file.modified, file.modified))
    path.chmod(file.mode)


def _settle(staging: Path, manifest: Manifest, home: Path) -> None:
    """Adapt what depends on the place: runs that were running, and the paths of artifacts."""
    for path in staging.glob(f"runs/*/{RUN_FILE}"):
        with suppress(UserError):  # a run that was damaged before the backup stays damaged, and commands report it
            end_elsewhere(path.parent)
    before = Path(manifest.home)
    if before == home:
        return
    if (staging / "mlflow.db").is_file():
        move_artifacts(staging / "mlflow.db", before, home)
    old, new = (json.dumps(f"{each}/")[:-1].encode() for each in (before, home))
    for path in staging.glob("runs/*/done/*.json"):
        path.write_bytes(path.read_bytes().replace(old, new))


def _stack(
    staging: Path, manifest: Manifest, stack: Stack, folder: Path, steps: Steps, put: Callable[[str, Path], None]
) -> None:
    """Create the stack in a folder that is renamed later."""
    # In a copy of the home too, because `prepare` creates a folder in the home.
    staged = Stack(stack.config.model_copy(update={"folder": str(folder)}), staging)
    servers.restore_stack(manifest, stack, staged, steps, put)
    (folder / RESTORED).write_text(json.dumps({"created": manifest.created, "host": manifest.host}))


def _is_of(folder: Path, manifest: Manifest) -> bool:
    """Return whether an interrupted restore of this backup has already created the stack's folder."""
    try:
        found = json.loads((folder / RESTORED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == {"created": manifest.created, "host": manifest.host})
