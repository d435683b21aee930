"""A PostgreSQL server of a test's own, on loopback, ended by its own process."""

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flows.deployment.local_servers import free_port
from tests.waiting import PATIENCE, until

SCRIPT = Path(__file__).resolve().parents[1] / "infra/kubernetes/base/make-databases.sh"


class PostgresqlCluster:
    """A cluster in a folder. The user postgres runs it where root runs the tests, because PostgreSQL refuses root."""

    def __init__(self, folder: Path, *options: str) -> None:
        found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda path: float(path.parts[-3]))
        if not found:
            pytest.skip("`sh infra/test-servers.sh .venv/bin/python .tether/programs` installs PostgreSQL")
        self.folder, self._path = folder, f"{found[-1].parent}:{os.environ['PATH']}"
        self._as_owner: list[str] = []
        folder.mkdir(parents=True, exist_ok=True)
        if os.getuid() == 0:
            owner = pwd.getpwnam("postgres")
            os.chown(folder, owner.pw_uid, owner.pw_gid)
            self._as_owner = ["setpriv", f"--reuid={owner.pw_uid}", f"--regid={owner.pw_gid}", "--clear-groups"]
        if not (folder / "data").exists():
            assert self.start("initdb", "-D", "data", "--no-sync", *options).wait() == 0

    def start(
        self, *words: str, prefix: tuple[str, ...] = (), log: Any = subprocess.DEVNULL, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a program of PostgreSQL's, or a script, as the cluster's owner."""
        given = {"PATH": self._path, "LC_ALL": "C.UTF-8", **variables}
        command = [*prefix, *self._as_owner, *words]
        return subprocess.Popen(command, cwd=self.folder, env=given, stdout=log, stderr=log, start_new_session=True)

    def wait(self, **where: str) -> None:
        """Wait until the server takes connections."""
        until("PostgreSQL answers", lambda: self.start("pg_isready", "-q", **where).wait() == 0, 60)

    def server(self, port: int, *options: str, **how: Any) -> subprocess.Popen[bytes]:
        """Start the server, on loopback and on a socket in its folder."""
        where = ("-p", str(port), "-k", str(self.folder), "-c", "listen_addresses=127.0.0.1")
        return self.start("postgres", "-D", "data", *where, *options, **how)

    def make_databases(self, port: int, secrets: Path) -> None:
        """Call the script of the manifests as PostgreSQL's image does: over a socket. Its user reads the secrets."""
        first, shown = self.server(port, "-c", "listen_addresses="), self.folder / "shown"
        try:
            shutil.copytree(secrets, shown, copy_function=shutil.copyfile)
            shown.chmod(0o755)
            given = {"PGHOST": str(self.folder), "PGPORT": str(port), "SECRETS": str(shown)}
            self.wait(**given)
            assert self.start("sh", str(SCRIPT), **given).wait() == 0
        finally:
            shutil.rmtree(shown)
            first.send_signal(signal.SIGINT)
            first.wait(PATIENCE * 60)


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The address of a PostgreSQL server that asks for no password, without a database."""
    folder, port = Path(tempfile.mkdtemp(prefix="tether-postgresql-")), free_port(0)
    folder.chmod(0o755)
    cluster = PostgresqlCluster(folder, "-U", "review", "-A", "trust")
    server = cluster.server(port)
    try:
        cluster.wait(PGHOST="127.0.0.1", PGPORT=str(port))
        yield f"postgresql://review@127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(PATIENCE * 60)
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str, name: str) -> str:
    """The URL of a new database of a server."""
    import psycopg

    with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    return f"{server}/{name}"
