"""A PostgreSQL server of its own, on loopback, ended by its own process."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flows.deployment.servers import free_port
from flows.stack.config import DEFAULT, load_stack
from tests.waiting import PATIENCE, until


@contextmanager
def postgresql_server() -> Iterator[str]:
    """The address of a PostgreSQL server, without a database."""
    stack = load_stack(DEFAULT, Path("nowhere"))
    programs, port = stack.postgres_programs, free_port(0)
    folder = Path(tempfile.mkdtemp(prefix="tether-review-"))
    user: dict[str, Any] = {}
    if os.getuid() == 0:  # which PostgreSQL refuses to run as
        entry = pwd.getpwnam("postgres")
        os.chown(folder, entry.pw_uid, entry.pw_gid)
        user = {"user": "postgres", "group": entry.pw_gid, "extra_groups": []}
    made = [programs / "initdb", "-D", folder / "data", "-U", "review", "-A", "trust", "--no-sync"]
    subprocess.run(made, check=True, capture_output=True, cwd="/", **user)
    run = [programs / "postgres", "-D", folder / "data", "-p", str(port), "-k", str(folder)]
    run += ["-c", "listen_addresses=127.0.0.1"]
    server = subprocess.Popen(run, stderr=subprocess.DEVNULL, cwd="/", **user)
    try:
        yield f"postgresql://review@127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(PATIENCE * 60)
        shutil.rmtree(folder, ignore_errors=True)


def new_database(server: str, name: str) -> str:
    """The URL of a new database of a server that may be about to start."""
    import psycopg

    def made() -> bool:
        try:
            with psycopg.connect(f"{server}/postgres", autocommit=True) as connection:
                connection.execute(f'CREATE DATABASE "{name}"')
        except psycopg.OperationalError:
            return False
        return True

    until("PostgreSQL answers", made, 30)
    return f"{server}/{name}"
