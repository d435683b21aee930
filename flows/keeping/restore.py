"""`tether restore`: turn a backup into a home again, completely or not at all.

Everything is written into a folder next to the home, and each file is compared with the manifest while it is copied.
Then the databases and buckets that the environment names are filled, and at last the folder is renamed to the home.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from components.base.errors import UserError
from components.base.files import make_folder, sync, whole_folder
from components.store.place import VARIABLE, Place
from components.store.store import shared_place
from flows.keeping.copying import Steps
from flows.keeping.manifest import MANIFEST, Manifest, checked, read_manifest
from flows.keeping.server_backup import check_servers, fill, make_bucket, named_servers, restore_servers
from tasks.runs.schema import HOME_SCHEMA, newer
from tasks.runs.status import RUN_FILE, end_elsewhere
from tasks.tracking.database import move_artifacts

Say = Callable[[str], object]

STORES = ("shared", "stack/store")
"""Folders of a backup for the store that `TETHER_STORE` names; the second one in format 1."""


def restore(source: Path, home: Path, steps: Steps, say: Say) -> Manifest:
    """Restore a home, and the servers' data if the backup has them, and return the backup's manifest.

    Args:
        source: the backup's folder.
        home: the Tether home to create; it must be empty or missing.
        steps: shows the progress.
        say: gets lines for a person.

    Raises:
        UserError: the folder is not a backup, one of its files is damaged, or the home or a database is not empty;
            nothing was changed. Or a server fails.
    """
    manifest = read_manifest(source)
    if manifest.home_schema is not None and manifest.home_schema > HOME_SCHEMA:
        raise newer(source / MANIFEST, "home", manifest.home_schema, HOME_SCHEMA)
    shared, servers = _check(manifest, source, home), named_servers()
    check_servers(manifest, servers)

    def put(name: str, path: Path) -> None:
        file = manifest.files[name]
        make_folder(path.parent)
        with path.open("wb") as target:
            os.fchmod(target.fileno(), 0o600)
            target.writelines(checked(source, name, file))
        os.utime(path, (file.modified, file.modified))
        path.chmod(file.mode)

    with _whole_home(home) as staging:
        steps.all("verifying", manifest.files, lambda name: deque(checked(source, name, manifest.files[name]), 0))
        steps.all("home", manifest.below("home"), lambda name: put(f"home/{name}", staging / name))
        _settle(staging, manifest, home)
        restore_servers(manifest, servers, staging, steps, put)
        if shared is not None:
            make_bucket(shared)
            with shared.using():
                for folder in STORES:
                    fill(shared, manifest, folder, steps, put, staging)
    if manifest.home != str(home):
        say(
            f"The home was {manifest.home} and is now {home}. Files outside the home that runs name by path stay where "
            "they are."
        )
    if manifest.stack is not None:
        say(
            f"This is a backup of a stack: its passwords are in {source}/stack/secrets/passwords.json, "
            "and MLflow's users keep theirs. Deploy each deployment again, because it has the stack's addresses."
        )
    return manifest


@contextmanager
def _whole_home(home: Path) -> Iterator[Path]:
    """Yield a folder that becomes the home at the end. A mount point cannot be replaced: it gets the content."""
    if not os.path.ismount(home):
        with whole_folder(home) as staging:
            yield staging
        return
    with whole_folder(home / "restored") as staging:
        yield staging
    for path in sorted((home / "restored").iterdir()):
        path.rename(home / path.name)
    (home / "restored").rmdir()
    sync(home)


def _check(manifest: Manifest, source: Path, home: Path) -> Place | None:
    """Refuse if a folder is in the way. Return the store at `TETHER_STORE` that is to be filled, if the backup has
    one."""
    way_out = "Move it away, or set TETHER_HOME to a folder that does not exist yet."
    if home.is_symlink() or (home.exists() and not home.is_dir()):
        raise UserError(f"restore: {home} exists and is not a folder. {way_out}")
    if home.is_dir() and any(home.iterdir()):
        raise UserError(f"restore: {home} is not empty, and a restore overwrites nothing. {way_out}")
    if source.resolve().is_relative_to(home.resolve()):
        raise UserError(f"restore: {source} is inside {home}. Move the backup elsewhere first.")
    if not any(manifest.below(folder) for folder in STORES):
        return None
    shared = shared_place(home)
    if shared is None:
        raise UserError(
            f"restore: the backup includes the store that {VARIABLE} named, {manifest.shared or 'a stack has it'}. "
            f"Set {VARIABLE} to the folder or bucket to restore it to."
        )
    return shared


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
    old, new = (json.dumps(f"{folder}/")[:-1].encode() for folder in (before, home))
    for path in staging.glob("runs/*/done/*.json"):
        path.write_bytes(path.read_bytes().replace(old, new))
