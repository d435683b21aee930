"""Export a run as a file, and import such a file into another home."""

import shutil
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.files import sweep, whole_folder
from components.store.archive import admit, read_archive, write_archive
from components.store.retention import stored
from components.store.store import ArtifactStore, Miss, Record
from tasks.retention.believed import believed_files
from tasks.runs.config import CONFIG
from tasks.runs.schema import mark_home
from tasks.runs.status import RUN_FILE, RunStatus, finished_file, has_run, load_status


class Imported(NamedTuple):
    """The result of an import."""

    run: str
    new_run: bool
    """False if a run with that id was here already; it is unchanged."""
    records: int
    new_records: int
    objects: int


def export_run(store: ArtifactStore, run: str | None, target: Path | None) -> tuple[str, Path]:
    """Write a run (None: the newest) to a file (None: RUN.tar in the current directory). Return its id and the file.

    Raises:
        UserError: there is no such run, it is still running, or the file exists.
        TetherError: an object is damaged.
    """
    status = load_status(store.home, run)
    if status.state == "running":
        raise UserError(f"run {status.run} is running; export it when it has ended.")
    target = target or Path(f"{status.run}.tar")
    if target.exists():
        raise UserError(f"--to {target}: this file already exists. Name another one.")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--to {target}: there is no folder {target.absolute().parent}.")
    folder = store.home / "runs" / status.run
    with store.using():
        write_archive(target, store, run_files(folder), run_records(store, status))
    return status.run, target


def import_run(store: ArtifactStore, path: Path) -> Imported:
    """Import a run that another home exported. Existing results stay; importing twice is harmless.

    The run's files are written from verified content only, and say that it was imported. MLflow does not get it.

    Raises:
        UserError: the file is damaged, or another run with that id is here; nothing was written.
    """
    archive = read_archive(path, _room(store))
    for part in ("runs", "store"):  # remains of a killed import
        sweep(store.home / part)
    document, files = believed_files(archive)
    run, folder = document.run, store.home / "runs" / document.run
    new_run = not has_run(store.home, run)
    if not new_run and finished_file(folder).started != document.started:
        raise UserError(f"{path} is refused, and nothing of it was written: another run {run} is here, in {folder}.")
    if new_run and (folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir())))):
        raise UserError(
            f"{path} is not imported, and nothing of it was written: {folder} exists and is not a run. Move it away."
        )
    mark_home(store.home)
    new_records = admit(archive, store)
    if new_run:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            for name, data in files.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(data)
    return Imported(run, new_run, len(archive.records), len(new_records), len(archive.objects))


def _room(store: ArtifactStore) -> int:
    """Return the most bytes that an archive's objects may have: the free space plus the objects already here."""
    folder = next(each for each in (store.objects, *store.objects.parents) if each.is_dir())
    return shutil.disk_usage(folder).free + sum(entry.size for entry in store.local.entries("objects"))


def run_files(folder: Path) -> dict[str, bytes]:
    """Return a run's files for another home, without what only this home's MLflow and processes need."""
    points = {f"metrics/{path.name}": path.read_bytes() for path in sorted((folder / "metrics").glob("*.jsonl"))}
    status = finished_file(folder).model_dump_json(indent=1).encode()
    return {RUN_FILE: status, CONFIG: (folder / CONFIG).read_bytes(), **points}


def run_records(store: ArtifactStore, status: RunStatus) -> list[Record]:
    """Return the complete records that a run is based on: those of its stages, and of everything they were made
    from."""
    needed = set(status.needs)
    by_digest: dict[str, list[Record]] = {}
    for each in stored(store, store.place):
        if isinstance(each.record, Record):
            by_digest.setdefault(each.record.digest, []).append(each.record)
    found: dict[str, Record] = {}
    digests = [stage.digest for stage in status.stages if stage.digest]
    while digests:
        digest = digests.pop()
        if digest in found:
            continue
        # External inputs have no record. If several records have the same bytes, the run's own comes first.
        choice = max(by_digest.get(digest, []), key=lambda one: (one.key in needed, one.attempt, one.key), default=None)
        if choice is not None:
            found[digest] = choice
            digests += choice.inputs.values()
    for stage in status.stages:
        if stage.digest and stage.digest not in found:
            missing = store.lookup(stage.key or "")
            reason = missing.reason if isinstance(missing, Miss) else "another result is stored under its key now"
            raise UserError(
                f"run {status.run} can't be exported: the store has no {stage.name} of it ({reason}). "
                "Run it again to compute that, then export the new run."
            )
    return list(found.values())
