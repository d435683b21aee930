"""The servers of a stack in a backup: databases as PostgreSQL dumps, buckets as objects, secrets, TLS's authority.

Passwords reach PostgreSQL's programs by the stack's own `pgpass` (mode 600), never by a command line.
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
from flows.stack.checks import Answer, Wrong, ask_all, make_buckets, s3_options
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
"""In the order in which they are dumped: the first one's permissions name experiments of the second."""
START_SECONDS = 120.0
_TREES = ("secrets", "tls")
"""Folders of the stack that are kept: passwords, and what signs its certificates."""
_NOT_COPIED = ("pgpass", "s3.json", "aws", "next.json")
"""Files of secrets that are made of the passwords at each start, or of a change of passwords."""


def check_up(stack: Stack) -> None:
    """See that the databases and the S3 server answer, which are asked for their contents.

    Raises:
        UserError: one does not.
    """
    answers = {each.part: each for each in _asked(stack)}
    wrong = [answers[part] for part in (POSTGRES, S3) if answers[part].verdict != "ok"]
    if wrong:
        raise UserError(
            f"backup: the stack in {stack.folder} does not answer ({wrong[0].part}: {wrong[0].told}). Its databases "
            f"and buckets are copied from its servers: start it with `tether stack up`, then back up."
        )


def _asked(stack: Stack) -> list[Answer]:
    return ask_all(stack, read_passwords(stack))


def store_of(stack: Stack) -> UrlPlace:
    """Return the place that `TETHER_STORE` names in the stack's terminals, asked directly."""
    return UrlPlace("s3://tether/store", **s3_options(stack, "tether", read_passwords(stack)["s3_tether"]))


def artifacts_of(stack: Stack) -> UrlPlace:
    """Return MLflow's bucket."""
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
    """Copy the passwords, and the authority that clients trust."""
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
    """Make the stack of a backup in `staged.folder`, which is to become that of `stack`.

    Its PostgreSQL and its S3 server run while they are filled, on the ports of the stack's config.

    Args:
        manifest: what is in the backup.
        stack: where the stack is to be.
        staged: the same in a folder of its own.
        steps: shows the progress.
        put: writes a file of the backup to a path, checked.

    Raises:
        UserError: a port is taken, or a program is not installed. TetherError: a server or pg_restore fails.
    """
    if (state := read_state(stack)) is not None and state.alive():
        raise UserError(f"restore: the stack in {stack.folder} runs. `tether stack down` first, and move it away.")
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
    staged.exports.unlink()  # `up` writes it, with the place that the stack has by then


def fill(
    place: Place,
    manifest: Manifest,
    folder: str,
    steps: Steps,
    put: Callable[[str, Path], None],
    drafts: Path,
    to: str = "",
) -> None:
    """Add to a place what it lacks of a folder of the backup: records after all objects, the oldest first, then pins.

    A record counts once it is there, and of one that was written later it is believed that it is newer. Nothing that is
    there is changed, but an object of another size, which is damaged.
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
    """PostgreSQL and the S3 server, as long as the block."""
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
    """Return whether a server takes what is to be done."""
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
