"""A stack's servers in a backup: databases as PostgreSQL dumps, buckets as objects, secrets, and TLS's authority.

PostgreSQL's programs read passwords from the stack's own `pgpass` (mode 600), never from a command line.
"""

import os
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from components.base.errors import TetherError, UserError
from components.base.files import make_folder
from components.store.place import Entry, Place
from components.store.records import check_names
from components.store.url import UrlPlace
from flows.deployment.supervision import Supervised
from flows.stack.checks import Wrong, ask_all, make_buckets, s3_options
from flows.stack.config import LOOPBACK, Stack
from flows.stack.keeper import end_in_order
from flows.stack.keeping.copying import Copier, Steps, files_below
from flows.stack.keeping.manifest import CHUNK, Manifest
from flows.stack.logs import last_line, log_of
from flows.stack.parts import POSTGRES, S3, stack_parts
from flows.stack.prepare import prepare
from flows.stack.secrets import read_passwords
from flows.stack.state import read_state

DATABASES = ("mlflow_auth", "mlflow", "prefect")
"""In the order in which they are dumped: permissions in the first one refer to experiments in the second."""
START_SECONDS = 600.0
_TREES = ("secrets", "tls")
"""Folders of the stack that are backed up: passwords, and the authority of its certificates."""
_NOT_COPIED = ("pgpass", "s3.json", "aws", "next.json")
"""Files in `secrets` that are written from the passwords at each start, or while passwords are changed."""


def check_up(stack: Stack) -> None:
    """Check that the databases and the S3 server answer, because they are asked for their contents.

    Raises:
        UserError: one of them does not answer.
    """
    answers = {each.part: each for each in ask_all(stack, read_passwords(stack))}
    wrong = [answers[part] for part in (POSTGRES, S3) if answers[part].verdict != "ok"]
    if wrong:
        raise UserError(
            f"backup: the stack in {stack.folder} does not answer ({wrong[0].part}: {wrong[0].told}). Its databases "
            f"and buckets are copied from its servers: start it with `tether stack up`, then back up."
        )


def store_of(stack: Stack) -> UrlPlace:
    """Return the place that `TETHER_STORE` names in the stack's terminals, reached without TLS."""
    return UrlPlace("s3://tether/store", **s3_options(stack, "tether", read_passwords(stack)["s3_tether"]))


def artifacts_of(stack: Stack) -> UrlPlace:
    """Return MLflow's bucket, reached without TLS."""
    return UrlPlace("s3://mlflow", **s3_options(stack, "mlflow", read_passwords(stack)["s3_mlflow"]))


def dump(stack: Stack, copier: Copier, steps: Steps) -> None:
    """Dump the three databases, each as of one moment.

    Raises:
        TetherError: pg_dump fails.
    """
    for name in steps.each("PostgreSQL", DATABASES):
        with tempfile.TemporaryFile() as file:
            _run(stack, "pg_dump", ["--format=custom", "--dbname", name], name, stdout=file.fileno())
            file.seek(0)
            copier.write(f"stack/databases/{name}.dump", iter(lambda: file.read(CHUNK), b""))


def copy_artifacts(stack: Stack, copier: Copier, steps: Steps) -> None:
    """Copy the objects of MLflow's bucket."""
    place = artifacts_of(stack)
    found = place.entries("artifacts")
    check_names([each.name for each in found])

    def copy(entry: Entry) -> None:
        copier.write(f"stack/artifacts/{entry.name}", place.chunks(f"artifacts/{entry.name}"), modified=entry.modified)

    steps.all("MLflow's artifacts", found, copy)


def copy_secrets(stack: Stack, copier: Copier, steps: Steps) -> None:
    """Copy the passwords, and the authority of the certificates."""
    found = {
        f"{tree}/{name}": path
        for tree in _TREES
        for name, path in files_below(stack.folder / tree).items()
        if path.name not in _NOT_COPIED
    }
    for name in steps.each("secrets", found):
        copier.file(found[name], f"stack/{name}")


def restore_stack(
    manifest: Manifest, stack: Stack, staged: Stack, steps: Steps, put: Callable[[str, Path], None]
) -> None:
    """Create the stack of a backup in `staged.folder`, which later becomes the folder of `stack`.

    Its PostgreSQL and S3 server run while they are filled, on the ports in the stack's config.

    Args:
        manifest: the backup's manifest.
        stack: the stack as it will be.
        staged: the same stack in another folder.
        steps: shows the progress.
        put: writes a file of the backup to a path, and verifies it.

    Raises:
        UserError: a port is in use, or a program is not installed.
        TetherError: a server or pg_restore fails.
    """
    if (state := read_state(stack)) is not None and state.alive():
        raise UserError(f"restore: the stack in {stack.folder} runs. Run `tether stack down` first, then move it away.")
    for name in manifest.below("stack"):
        if name.partition("/")[0] in _TREES:
            path = staged.folder / name
            make_folder(path.parent)
            put(f"stack/{name}", path)
    passwords = prepare(staged)
    with _at_work(staged, passwords):
        for name in steps.each("PostgreSQL", DATABASES):
            draft = staged.folder / f"{name}.dump"
            put(f"stack/databases/{name}.dump", draft)
            options = ["--exit-on-error", "--single-transaction", "--no-owner", "--dbname", name, str(draft)]
            _run(staged, "pg_restore", options, name)
            draft.unlink()
        fill(store_of(staged), manifest, "stack/store", steps, put, staged.folder)
        fill(artifacts_of(staged), manifest, "stack/artifacts", steps, put, staged.folder, "artifacts/")
    staged.exports.unlink()  # `up` writes it again, for the stack's final folder


def fill(
    place: Place,
    manifest: Manifest,
    folder: str,
    steps: Steps,
    put: Callable[[str, Path], None],
    drafts: Path,
    to: str = "",
) -> None:
    """Add the files of a backup's folder that a place lacks: all objects, then records, oldest first, then pins.

    A record is used as soon as it exists, and the one written last counts as the newest. Existing files are not
    changed, except for an object of the wrong size, which is damaged.
    """
    files = manifest.below(folder)
    late = {"records": 1, "pins": 2}

    def add(name: str) -> None:
        size = place.size(f"{to}{name}")
        if size is None or (name.startswith("objects/") and size != files[name].size):
            draft = drafts / f"draft-{uuid.uuid4().hex}"
            put(f"{folder}/{name}", draft)
            place.put(f"{to}{name}", draft)
            draft.unlink()

    ordered = sorted(files, key=lambda name: (late.get(name.partition("/")[0], 0), files[name].modified, name))
    first = [name for name in ordered if name.partition("/")[0] not in late]
    steps.all(f"{folder}: objects", first, add)
    for name in steps.each(f"{folder}: records", ordered[len(first) :]):
        add(name)


@contextmanager
def _at_work(stack: Stack, passwords: dict[str, str]) -> Iterator[None]:
    """Run PostgreSQL and the S3 server while the block runs."""
    parts = [part for part in stack_parts(stack, passwords) if part.service.name in (POSTGRES, S3)]
    running = [(part, Supervised(part.service, log_of(stack, part.service.name))) for part in parts]
    try:
        until = time.monotonic() + START_SECONDS
        for part, supervised in running:
            while not _ready(stack, passwords, part.service.name):
                if supervised.process.poll() is not None or time.monotonic() > until:
                    name = part.service.name
                    raise TetherError(f"{name} does not start: {last_line(stack, name)}")
                time.sleep(0.2)
        yield
    finally:
        end_in_order((part, supervised.process) for part, supervised in running)


def _ready(stack: Stack, passwords: dict[str, str], part: str) -> bool:
    """Return whether a server accepts the operations of a restore."""
    if part == S3:
        try:
            make_buckets(stack, passwords)
        except Wrong:
            return False
        return True
    try:
        socket.create_connection((LOOPBACK, stack.config.ports.postgres), timeout=1).close()
        _run(stack, "psql", ["--no-psqlrc", "--command", "SELECT 1", "--dbname", "prefect"], "prefect")
    except (OSError, TetherError):
        return False
    return True


def _run(stack: Stack, program: str, options: list[str], role: str, stdout: int = subprocess.DEVNULL) -> None:
    path = stack.postgres_programs / program
    if not os.access(path, os.X_OK):
        raise UserError(f"{path}: no such program. Install PostgreSQL's client programs (Debian: postgresql-client).")
    where = ["--host", LOOPBACK, "--port", str(stack.config.ports.postgres), "--username", role, "--no-password"]
    environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8", "PGPASSFILE": str(stack.secrets / "pgpass")}
    done = subprocess.run(
        [str(path), *where, *options], stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False, text=True
    )
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise TetherError(f"{program} of database {role}: {said}")
