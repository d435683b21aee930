"""`tether backup`: copy a home, its databases and its store into one folder, consistently while runs continue.

A file that refers to another one is copied before it, and nothing that is referred to is removed meanwhile:

1. What each run has recorded as sent to MLflow (`mlflow.json`). MLflow may have more by the time its database is
   copied: a restored run looks that up before it sends anything again. MLflow must not have less, or a run would never
   send the rest.
2. The databases, each as of one moment: MLflow's users, its runs and registered models, and Prefect's. They refer to
   artifacts, runs and results in the store.
3. The files that MLflow keeps.
4. The runs, each run.json before the files it refers to. They refer to records in the store.
5. The store: pins, records, objects (`copying.copy_store`).

From before step 1 until after step 5 the store's garbage collector is held off (`Place.using`), as during a publishing
run. All other removals concern files to which nothing refers: drafts, and folders of runs that did not begin.

`work/` is left out. An unfinished stage has no result yet, and its checkpoints change every few seconds and are several
times as large as the model. A run that was computing is `interrupted` in the restored home. The same command computes
the unfinished stage from its first step, with the same bytes, and finds the earlier stages in the store.
"""

import contextlib
import importlib.metadata
import socket
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.files import whole_folder
from components.base.text import counted
from components.store.records import KEY, Record, parse_record
from components.store.store import ArtifactStore, shared_place
from flows.keeping.copying import Copier, Steps, copy_store, files_below
from flows.keeping.manifest import Manifest, write_manifest
from flows.keeping.server_backup import Servers, copy_artifacts, dump, named_servers
from tasks.runs.journal import SENDING_LOCK, SENT, Sent
from tasks.runs.schema import HOME_FILE, home_schema
from tasks.runs.status import RUN_FILE

Say = Callable[[str], object]

LEFT_OUT = {
    "work": "stages at work and their checkpoints",
    "store/views": "made again from the store",
    "logs": "of servers and workers",
}
"""The folders of a home that no backup has, and what they hold."""
_NOT_COPIED = {SENT, SENDING_LOCK}
"""Files in a run's folder that are copied separately, or not at all."""


class Written(NamedTuple):
    """A finished backup."""

    folder: Path
    manifest: Manifest
    bytes: int


def back_up(home: Path, target: Path, steps: Steps, say: Say) -> Written:
    """Write a backup of a home, its store and the servers that the environment names into a new folder.

    Args:
        home: the Tether home.
        target: the folder to write; it appears only when it is complete.
        steps: shows the progress.
        say: gets lines for a person.

    Raises:
        UserError: there is nothing to back up, `target` exists and is not empty, `target` is inside the home, or a
            server does not answer.
    """
    target, servers = target.absolute(), named_servers()
    if not servers.databases and not any((home / name).exists() for name in ("runs", "store", "mlflow.db", "models")):
        raise UserError(f"{home} has no run, result or model, so there is nothing to back up. Set TETHER_HOME.")
    if target.is_relative_to(home.absolute()) or target.resolve().is_relative_to(home.resolve()):
        raise UserError(
            f"backup {target}: this folder is inside {home}, and would be lost with it. Name a folder elsewhere."
        )
    _refuse_taken(target)
    with whole_folder(target) as folder:
        folder.chmod(0o700)
        copier = Copier(folder)
        shared = _copy(home, servers, steps, copier, say)
        _say_what_is_missing(folder, copier, say)
        manifest = Manifest(
            tether=importlib.metadata.version("tether"),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            host=socket.gethostname(),
            home=str(home),
            home_schema=_schema(home),
            shared=shared,
            left_out=[f"{name} ({what})" for name, what in LEFT_OUT.items()],
            files=dict(sorted(copier.files.items())),
        )
        write_manifest(folder, manifest)
        _refuse_taken(target)  # another backup may have been quicker
    return Written(target, manifest, sum(file.size for file in manifest.files.values()))


def _schema(home: Path) -> int | None:
    """Return the number of the home's format; None also if the file with the number is damaged (it is copied as it
    is)."""
    with contextlib.suppress(UserError):
        return home_schema(home)
    return None


def _copy(home: Path, servers: Servers, steps: Steps, copier: Copier, say: Say) -> str:
    """Copy everything in the order that the module's docstring gives; return the shared store's name, if any."""
    local = ArtifactStore(home, alone=True).local
    shared = shared_place(home)
    with contextlib.ExitStack() as stack:
        for place in [*([shared] if shared else []), *([local] if local.root.is_dir() else [])]:
            stack.enter_context(place.using())
        records = sorted((home / "runs").glob(f"*/{SENT}"))
        steps.all("runs in MLflow", records, lambda path: copier.file(path, f"home/runs/{path.parent.name}/{SENT}"))
        dump(servers, copier, steps)
        databases = [name for name in ("mlflow.db", "prefect/prefect.db") if (home / name).is_file()]
        databases += sorted(f"review/{path.name}" for path in (home / "review").glob("*.db"))
        steps.all("databases", databases, lambda name: copier.database(home / name, f"home/{name}"), at_once=1)
        copy_artifacts(servers, copier, steps)
        _tree(home, "mlartifacts", steps, copier)
        _runs(home, steps, copier)
        shared_objects = copy_store(shared, "shared", steps, copier, say) if shared else set()
        copy_store(local, "home/store", steps, copier, say, without=shared_objects)
    _tree(home, "models", steps, copier, links=True)
    for name in (HOME_FILE, "prefect/profiles.toml"):
        copier.file(home / name, f"home/{name}")
    return shared.where if shared is not None else ""


def _tree(home: Path, name: str, steps: Steps, copier: Copier, links: bool = False) -> None:
    files = files_below(home / name, links)
    steps.all(name, files, lambda path: copier.file(files[path], f"home/{name}/{path}"))


def _runs(home: Path, steps: Steps, copier: Copier) -> None:
    """Copy every run that has begun. Its `mlflow.json` was copied before."""

    def copy(folder: Path) -> None:
        to = f"home/runs/{folder.name}"
        copier.file(folder / RUN_FILE, f"{to}/{RUN_FILE}")
        for name, file in files_below(folder).items():
            if name != RUN_FILE and name not in _NOT_COPIED:
                copier.file(file, f"{to}/{name}")
        if f"{to}/{SENT}" not in copier.files and (folder / SENT).is_file():
            # The run began after MLflow's database was copied. The copy may have part of the run, which is looked up
            # there.
            sent = Sent.load(folder)
            text = Sent(project=sent.project, code=sent.code).model_dump_json(indent=1)
            copier.write(f"{to}/{SENT}", [text.encode()], 0o644)

    steps.all("runs", sorted(path.parent for path in (home / "runs").glob(f"*/{RUN_FILE}")), copy)


def _say_what_is_missing(folder: Path, copier: Copier, say: Say) -> None:
    """Report files that could not be read, and objects that copied records need but the store lacks."""
    if copier.unreadable:
        say(
            f"Not in the backup, because unreadable: {counted(len(copier.unreadable), 'file')}, first "
            f"{copier.unreadable[0]}."
        )
    objects = {name.rpartition("/")[2] for name in copier.files if "/objects/" in name}
    missing: dict[str, str] = {}
    for name in copier.files:
        key = Path(name).parent.name
        if "/records/" in name and KEY.fullmatch(key):
            record = parse_record((folder / name).read_text(encoding="utf-8", errors="replace"), key)
            if isinstance(record, Record):
                missing |= {sha: record.stage for sha in record.objects.values() if sha not in objects}
    if missing:
        sha, stage = next(iter(missing.items()))
        say(
            f"Not in the backup, because not in the store: {counted(len(missing), 'object')} that records need, first "
            f"{sha[:12]} of {stage}. `tether store verify` lists them all; a run that needs one computes it again."
        )


def _refuse_taken(target: Path) -> None:
    if target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir()))):
        raise UserError(f"backup {target}: it exists, and is not an empty folder. Name another one.")
