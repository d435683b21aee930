"""Runs as files: what an export holds of a run, and how it becomes a run of another home."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from components.artifacts import ArtifactStore, Miss, Record
from components.errors import UserError
from components.files import whole_folder
from components.store_archive import Archive, admit, read_archive, write_archive
from components.store_needs import stored
from tasks.keeping import run_needs
from tasks.status import ENTRY, load_status

RUN = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)


class Imported(NamedTuple):
    """What an import did."""

    run: str
    new_run: bool
    """False where a run of that id was here; it stays as it was."""
    records: int
    new_records: int
    objects: int


def export_run(store: ArtifactStore, run: str | None, target: Path | None) -> tuple[str, Path]:
    """Write a run (None: the newest) into a file (None: RUN.tar in the current directory); returns its id and the file.

    Raises:
        UserError: there is no such run, it still runs, or the file is there already. TetherError: an object is damaged.
    """
    status = load_status(store.home, run)
    if status["state"] == "running":
        raise UserError(f"run {status['run']} is running; export it when it has ended.")
    target = target or Path(f"{status['run']}.tar")
    if target.exists():
        raise UserError(f"--to {target}: it is there already. Name another file.")
    if not target.absolute().parent.is_dir():
        raise UserError(f"--to {target}: there is no folder {target.absolute().parent}.")
    folder = store.home / "runs" / status["run"]
    with store.using():
        write_archive(target, store, run_files(folder), run_records(store, status))
    return status["run"], target


def import_run(store: ArtifactStore, path: Path) -> Imported:
    """Take up a run that another home exported. What is here already stays; twice is harmless.

    Raises:
        UserError: the file doesn't hold; nothing of it was written.
    """
    archive = read_archive(path)
    document = _document(archive)
    run = document["run"]
    new_records = admit(archive, store)
    folder = store.home / "runs" / run
    new_run = not (folder / "run.json").is_file()
    if new_run:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as temporary:
            for name, data in archive.files.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                (temporary / name).write_bytes(data)
    return Imported(run, new_run, len(archive.records), len(new_records), len(archive.objects))


def run_files(folder: Path) -> dict[str, bytes]:
    """A run's own files as another home needs them: without what only this one's MLflow and processes know."""
    document = json.loads((folder / "run.json").read_text())
    if document["finished"] is None:  # its process was killed
        document["finished"] = document["updated"]
    origin = {name: value for name, value in document["origin"].items() if name != "flow_run"}
    document |= {"process": {}, "origin": origin}
    for stage in document["stages"]:
        stage["state"] = "interrupted" if stage["state"] == "running" else stage["state"]
    files = {"run.json": json.dumps(document, indent=1, allow_nan=False).encode()}
    files["config.yaml"] = (folder / "config.yaml").read_bytes()
    files |= {f"metrics/{path.name}": path.read_bytes() for path in sorted((folder / "metrics").glob("*.jsonl"))}
    return files


def run_records(store: ArtifactStore, status: Mapping[str, Any]) -> list[Record]:
    """The records a run rests on, each whole: those of its stages, and what these were made from."""
    needed = set(run_needs(status))
    by_digest: dict[str, list[Record]] = {}
    for each in stored(store, store.place):
        if isinstance(each.record, Record):
            by_digest.setdefault(each.record.digest, []).append(each.record)
    found: dict[str, Record] = {}
    digests = [stage["digest"] for stage in status["stages"] if stage["digest"]]
    while digests:
        digest = digests.pop()
        if digest in found:
            continue
        # An input that no stage made has no record; of several that gave the same bytes, the run's own comes first.
        choice = max(by_digest.get(digest, []), key=lambda one: (one.key in needed, one.attempt, one.key), default=None)
        if choice is not None:
            found[digest] = choice
            digests += choice.inputs.values()
    for stage in status["stages"]:
        if stage["digest"] and stage["digest"] not in found:
            missing = store.lookup(stage["key"])
            reason = missing.reason if isinstance(missing, Miss) else "another result stands under its key now"
            raise UserError(
                f"run {status['run']} can't be exported: the store has nothing of its {stage['name']} ({reason}). "
                f"Run it again, which computes that, then export the new run."
            )
    return list(found.values())


def _document(archive: Archive) -> dict[str, Any]:
    """The archive's run.json, looked at as closely as its records were."""
    try:
        document = json.loads(archive.files["run.json"])
        run, stages = document["run"], document["stages"]
        fine = isinstance(run, str) and RUN.fullmatch(run) and document["finished"] and "config.yaml" in archive.files
        fine = fine and {"profile", "started", "updated", "process", "origin"} <= set(document)
        fine = fine and all(tuple(stage) == ENTRY for stage in stages)
        lacking = list(_lacking(stages, archive.records)) if fine else []
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{archive.path} is refused: its run.json doesn't parse ({type(error).__name__}).") from error
    if not fine:
        raise UserError(f"{archive.path} is refused: its run.json is none that Tether writes.")
    if lacking:
        raise UserError(f"{archive.path} is refused: it lacks the records of {', '.join(lacking)}.")
    return document


def _lacking(stages: list[dict[str, Any]], records: list[Record]) -> Iterator[str]:
    digests = {record.digest for record in records}
    return (stage["name"] for stage in stages if stage["digest"] and stage["digest"] not in digests)
