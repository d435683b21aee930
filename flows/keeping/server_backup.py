"""The servers' data in a backup: PostgreSQL databases as dumps, MLflow's artifacts as objects.

The addresses are those that the servers of Prefect and MLflow read from their environment. PostgreSQL's programs and
the S3 client find passwords where they always do (`PGPASSFILE`, `AWS_SECRET_ACCESS_KEY`); no command line has one.
"""

import configparser
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from components.base.errors import UserError
from components.base.redaction import redacted
from components.store.place import Entry, Place
from components.store.records import check_names
from components.store.store import place_at
from components.store.url import UrlPlace
from flows.keeping.copying import Copier, Steps
from flows.keeping.manifest import CHUNK, Manifest

if TYPE_CHECKING:
    from sqlalchemy import URL

AUTH, ARTIFACTS = "MLFLOW_AUTH_CONFIG_PATH", "MLFLOW_ARTIFACTS_DESTINATION"
DATABASES = {
    "mlflow_auth": AUTH, "mlflow": "MLFLOW_BACKEND_STORE_URI", "prefect": "PREFECT_API_DATABASE_CONNECTION_URL",
}  # fmt: skip
"""Maps each database to the variable that names it, in the order in which they are dumped: permissions in the first one
refer to experiments in the second."""
_TABLES = "select count(*) from pg_tables where schemaname not in ('pg_catalog', 'information_schema')"


class Servers(NamedTuple):
    """What the environment names of Prefect's and MLflow's servers."""

    databases: "dict[str, URL]"
    """PostgreSQL databases, by their names in a backup."""
    artifacts: Place | None
    """The place of MLflow's artifacts."""


def named_servers() -> Servers:
    """Return the databases and artifacts that the environment names.

    A database that is no PostgreSQL is left out: MLflow's and Prefect's SQLite files are files of the home.

    Raises:
        UserError: an address cannot be read.
    """
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    databases = {}
    for name, variable in DATABASES.items():
        text = os.environ.get(variable, "")
        try:
            if text and variable == AUTH:
                config = configparser.ConfigParser()
                config.read_string(Path(text).read_text(encoding="utf-8"), text)
                text = config["mlflow"]["database_uri"]
            url = make_url(text) if text else None
        except (OSError, configparser.Error, KeyError, ArgumentError) as error:
            raise UserError(
                f"{variable}: the address of a database can't be read there ({type(error).__name__}). Give the one "
                f"that the server was started with."
            ) from error
        if url is not None and url.get_backend_name() == "postgresql":
            databases[name] = url
    destination, endpoint = os.environ.get(ARTIFACTS, ""), os.environ.get("MLFLOW_S3_ENDPOINT_URL")
    options = {"endpoint_url": endpoint} if endpoint and destination.startswith("s3") else {}
    return Servers(databases, place_at(destination, ARTIFACTS, **options) if destination else None)


def servers_elsewhere(servers: Servers) -> list[str]:
    """Return a sentence for each server that this terminal uses and a backup from here does not include."""
    sentences = []
    for name, variable in (("Prefect", "PREFECT_API_URL"), ("MLflow", "MLFLOW_TRACKING_URI")):
        url = os.environ.get(variable, "")
        if "://" in url and not url.startswith(("file:", "sqlite:")) and name.lower() not in servers.databases:
            sentences.append(
                f"{name} is at {redacted(url)}, which is not part of this backup: back it up where it runs, or set "
                f"{DATABASES[name.lower()]}."
            )
    return sentences


def dump(servers: Servers, copier: Copier, steps: Steps) -> None:
    """Dump the databases, each as of one moment.

    Raises:
        UserError: pg_dump fails.
    """

    def dump_one(name: str) -> None:
        with tempfile.TemporaryFile() as file:
            _run("pg_dump", servers, name, ["--format=custom"], stdout=file.fileno())
            file.seek(0)
            copier.write(f"servers/databases/{name}.dump", iter(lambda: file.read(CHUNK), b""))

    steps.all("PostgreSQL", servers.databases, dump_one, at_once=1)


def copy_artifacts(servers: Servers, copier: Copier, steps: Steps) -> None:
    """Copy MLflow's artifacts."""
    place = servers.artifacts
    if place is None:
        return
    entries = place.entries("")
    check_names([file.name for file in entries])

    def copy(entry: Entry) -> None:
        copier.write(f"servers/artifacts/{entry.name}", place.chunks(entry.name), modified=entry.modified)

    steps.all("MLflow's artifacts", entries, copy)


def check_servers(manifest: Manifest, servers: Servers) -> None:
    """Check that there is an empty database for each one in the backup, and a place for the artifacts.

    Raises:
        UserError: an address is missing, a database does not answer, or one is not empty.
    """
    for name in DATABASES:
        if f"{manifest.servers}/databases/{name}.dump" not in manifest.files:
            continue
        if name not in servers.databases:
            raise UserError(
                f"restore: the backup has the database {name}. Set {DATABASES[name]} as its server has it, to an empty "
                f"PostgreSQL database to restore it into."
            )
        if _run("psql", servers, name, ["--no-psqlrc", "-Atc", _TABLES]).strip() != "0":
            raise UserError(
                f"restore: the database {name} ({DATABASES[name]}) has tables, and a restore overwrites nothing. Stop "
                f"its server, and make the database empty, or name an empty one."
            )
    if manifest.below(f"{manifest.servers}/artifacts") and servers.artifacts is None:
        raise UserError(f"restore: the backup has MLflow's artifacts. Set {ARTIFACTS} as MLflow's server has it.")


def restore_servers(
    manifest: Manifest, servers: Servers, drafts: Path, steps: Steps, put: Callable[[str, Path], None]
) -> None:
    """Fill the databases, each in one transaction, and the place of MLflow's artifacts.

    Args:
        manifest: the backup's manifest.
        servers: whose databases are empty (`check_servers`).
        drafts: a folder for temporary files.
        steps: shows the progress.
        put: writes a file of the backup to a path, and verifies it.
    """

    def restore_one(name: str) -> None:
        draft = drafts / f"draft-{name}"
        put(f"{manifest.servers}/databases/{name}", draft)
        options = ["--exit-on-error", "--single-transaction", "--no-owner", "--no-privileges", str(draft)]
        _run("pg_restore", servers, name.removesuffix(".dump"), options)
        draft.unlink()

    steps.all("PostgreSQL", manifest.below(f"{manifest.servers}/databases"), restore_one, at_once=1)
    if servers.artifacts is not None:
        make_bucket(servers.artifacts)
        fill(servers.artifacts, manifest, f"{manifest.servers}/artifacts", steps, put, drafts)


def make_bucket(place: Place) -> None:
    """Create the bucket of a place if it does not exist."""
    if isinstance(place, UrlPlace):
        place.make_root()


def fill(
    place: Place, manifest: Manifest, folder: str, steps: Steps, put: Callable[[str, Path], None], drafts: Path
) -> None:
    """Add the files of a backup's folder that a place lacks: all objects, then records, oldest first, then pins.

    A record is used as soon as it exists, and the one written last counts as the newest. Existing files are not
    changed, except for an object of the wrong size, which is damaged.
    """
    files = manifest.below(folder)
    late = {"records": 1, "pins": 2}

    def add(name: str) -> None:
        size = place.size(name)
        if size is None or (name.startswith("objects/") and size != files[name].size):
            draft = drafts / f"draft-{uuid.uuid4().hex}"
            put(f"{folder}/{name}", draft)
            place.put(name, draft)
            draft.unlink()

    ordered = sorted(files, key=lambda name: (late.get(name.partition("/")[0], 0), files[name].modified, name))
    first = [name for name in ordered if name.partition("/")[0] not in late]
    steps.all(f"{folder}: objects", first, add)
    steps.all(f"{folder}: records", ordered[len(first) :], add, at_once=1)


def _run(program: str, servers: Servers, name: str, options: list[str], stdout: int = subprocess.PIPE) -> str:
    """Run one of PostgreSQL's programs on a database; return what it printed. Raises UserError if it fails."""
    path, url = shutil.which(program), servers.databases[name]
    if path is None:
        raise UserError(f"{program}: no such program. Install PostgreSQL's clients (Debian: postgresql-client).")
    connection = {"--host": url.host, "--port": url.port, "--username": url.username, "--dbname": url.database}
    where = [f"{option}={value}" for option, value in connection.items() if value is not None]
    environment = {**os.environ, "LC_ALL": "C.UTF-8"}
    if url.password is not None:
        environment["PGPASSWORD"] = str(url.password)
    done = subprocess.run(
        [path, *where, "--no-password", *options], stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False,
        text=True,
    )  # fmt: skip
    if done.returncode != 0:
        message = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise UserError(f"{DATABASES[name]}: {program} fails on the database {name}: {redacted(message)}")
    return done.stdout or ""
