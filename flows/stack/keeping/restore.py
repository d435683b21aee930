"""`tether restore`: what a backup holds becomes a home again, in one step, or nothing does.

Everything is written into a folder beside the home, each file compared with the manifest as it is copied, and that
folder gets the home's name last. A stack whose folder is elsewhere gets its name just before; where the restore is
killed between the two, the same command takes it over.
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
"""In a stack's folder that was restored: of which backup it is."""


def restore(source: Path, home: Path, stack: Stack, steps: Steps, say: Say) -> Manifest:
    """Make a home, and the stack that it had, of a backup; returns what was in that.

    Args:
        source: the backup's folder.
        home: the `TETHER_HOME` to make; it is empty, or not there.
        stack: this machine's stack as its config says it is to be.
        steps: shows the progress.
        say: tells a person.

    Raises:
        UserError: the folder is no backup, a file of it is damaged, or there is something in the home; nothing was
            changed. TetherError: a server of the stack fails.
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
                folder.chmod(0o755)  # PostgreSQL's own user passes through it
                _stack(staging, manifest, stack, folder, steps, put)
        if shared is not None:
            with shared.using():
                servers.fill(shared, manifest, "shared", steps, put, staging)
    if manifest.home != str(home):
        say(
            f"The home was {manifest.home} and is {home} now. Files outside that runs name by path stay where they are."
        )
    return manifest


def _check(manifest: Manifest, source: Path, home: Path, stack: Stack) -> Place | None:
    """Refuse what stands in the way; returns the store to fill that `TETHER_STORE` names, if the backup has one."""
    way_out = "Move it away, or set TETHER_HOME to a folder that does not exist yet."
    if home.is_symlink() or (home.exists() and not home.is_dir()):
        raise UserError(f"restore: {home} is there and is no folder. {way_out}")
    if home.is_dir() and any(home.iterdir()):
        raise UserError(f"restore: {home} is not empty, and a restore overwrites nothing. {way_out}")
    if source.resolve().is_relative_to(home.resolve()):
        raise UserError(f"restore: {source} is inside of {home}. Move the backup elsewhere first.")
    folder = stack.folder
    if manifest.stack is not None and folder.is_dir() and any(folder.iterdir()) and not _is_of(folder, manifest):
        raise UserError(
            f"restore: {folder} is not empty, and the backup has a stack. `tether stack down` if it runs, then move it "
            f"away, or set folder in the stack's config."
        )
    shared = shared_place(home) if manifest.shared else None
    if manifest.shared and shared is None:
        raise UserError(
            f"restore: the backup has the store that {VARIABLE} named, {manifest.shared}. Set {VARIABLE} to the folder "
            f"or bucket that is to have it."
        )
    return shared


def _verify(source: Path, manifest: Manifest, steps: Steps) -> None:
    """Read the whole backup through, before anything is made of it."""

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
    """Change what would be wrong in another place: runs that were at work, and where artifacts are."""
    for path in staging.glob(f"runs/*/{RUN_FILE}"):
        with suppress(UserError):  # one that was damaged before the backup stays so, and commands name it
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
    """Make the stack in a folder that gets its name later."""
    # `prepare` makes a folder in the home, too.
    staged = Stack(stack.config.model_copy(update={"folder": str(folder)}), staging)
    servers.restore_stack(manifest, stack, staged, steps, put)
    (folder / RESTORED).write_text(json.dumps({"created": manifest.created, "host": manifest.host}))


def _is_of(folder: Path, manifest: Manifest) -> bool:
    """Return whether a stack's folder was restored from this backup, by a command killed before the home was there."""
    try:
        found = json.loads((folder / RESTORED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == {"created": manifest.created, "host": manifest.host})
