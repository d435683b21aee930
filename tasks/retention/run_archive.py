"""Export the results that a run is based on as a file, and import such a file into another home."""

from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.files import sweep
from components.store.archive import admit, read_archive, write_archive
from components.store.graph import Graph
from components.store.store import ArtifactStore, Miss, Record
from tasks.runs.status import RunStatus, load_status


class Imported(NamedTuple):
    """The result of an import."""

    records: int
    new_records: int
    objects: int


def export_run(store: ArtifactStore, run: str, target: Path | None) -> Path:
    """Write the results that a run is based on to a file (None: RUN.tar in the current directory). Return the file.

    Raises:
        UserError: there is no such run, it is still running, it has no result, or the file exists.
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
    with store.using():
        write_archive(target, store, _records(store, status))
    return target


def import_results(store: ArtifactStore, path: Path) -> Imported:
    """Import the results in an exported file. Existing results stay; importing twice is harmless.

    Raises:
        UserError: the file is damaged, or holds something that no export does; nothing was written.
    """
    archive = read_archive(path)
    sweep(store.home / "store")  # remains of a killed import
    new = admit(archive, store)
    return Imported(len(archive.records), len(new), len(archive.objects))


def _records(store: ArtifactStore, status: RunStatus) -> list[Record]:
    """Return the complete records that a run is based on: those of its stages, and of everything they were made
    from."""
    graph = Graph.of(store).of_keys(set(status.results))
    nodes = graph.upstream(stage.digest for stage in status.stages if stage.digest)
    records = {node.digest: node.records[0] for node in nodes if node.records}  # external inputs have none
    for stage in status.stages:
        if stage.digest and stage.digest not in records:
            missing = store.lookup(stage.key or "")
            reason = missing.reason if isinstance(missing, Miss) else "another result is stored under its key now"
            raise UserError(
                f"run {status.run} can't be exported: the store has no {stage.name} of it ({reason}). "
                "Run it again to compute that, then export the new run."
            )
    if not records:
        raise UserError(f"run {status.run} has no result yet, so there is nothing to export.")
    return list(records.values())
