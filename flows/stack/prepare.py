"""Prepare a stack for its start: folders, passwords (also changing them), config files and the database cluster."""

import fcntl
import os
import pwd
import shutil
import socket
import ssl
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from components.base.errors import TetherError, UserError
from components.base.files import make_folder
from flows.stack.config import Stack
from flows.stack.parts import postgres_user, stack_parts, write_configs
from flows.stack.secrets import (
    ROLES,
    USER,
    make_passwords,
    next_file,
    next_passwords,
    read_passwords,
    replace_passwords,
    scram,
    write_exports,
    write_files,
    write_private,
)
from flows.stack.state import read_state


def prepare(stack: Stack, running: Collection[str] = ()) -> dict[str, str]:
    """Create what does not exist yet, check that every port is free, and return the passwords by name.

    Args:
        stack: the stack.
        running: parts that already run and use their ports.

    Raises:
        UserError: a program is not installed, a port is in use, the certificate can't be used, or PostgreSQL's user
            can't reach the folder.
    """
    if not (stack.programs / "flask_wtf").is_dir() or not (stack.programs / "psycopg").is_dir():
        raise UserError(f"{stack.programs}: MLflow's database driver is missing. Run `make stack`, which installs it.")
    check_certificate(stack)
    make_folder(stack.home / "prefect")  # for the clients: Prefect does not create missing parent folders
    make_folder(stack.folder)
    for name in ("logs", "prefect", "s3", "tls"):
        make_folder(stack.folder / name)
        (stack.folder / name).chmod(0o700)
    finish_rotation(stack)
    passwords = make_passwords(stack)
    write_files(stack, passwords)
    write_configs(stack)
    write_exports(stack, passwords)
    for part in stack_parts(stack, passwords):
        if part.service.name not in running:
            for address, port in part.ports:
                _need_free(part.service.name, address, port)
    if not stack.database.exists():
        _make_cluster(stack, passwords)
    return passwords


def rotate(stack: Stack) -> None:
    """Replace all passwords of the stack while it is down. If it is interrupted, the next call or `up` finishes it.

    Raises:
        UserError: the stack is running, or was never started.
        TetherError: PostgreSQL does not accept the new passwords.
    """
    if not stack.database.exists():
        raise UserError(
            f"{stack.folder}: there are no databases yet. The first `tether stack up` creates the passwords."
        )
    read_passwords(stack)
    with stack.lock.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a running keeper holds this lock
        except BlockingIOError as error:
            raise UserError(
                "Passwords can only be changed while the stack is down. Run `tether stack down` first."
            ) from error
        if (state := read_state(stack)) is not None and state.alive():  # their keeper was killed
            raise UserError(f"{', '.join(state.alive())} of the stack runs. `tether stack down` first.")
        next_passwords(stack)
        finish_rotation(stack)
        passwords = read_passwords(stack)
        write_files(stack, passwords)
        write_exports(stack, passwords)


def finish_rotation(stack: Stack) -> None:
    """Set the next passwords, if there are any, in the databases, and make them the current ones. It can be
    repeated."""
    if not next_file(stack).exists():
        return
    passwords = next_passwords(stack)
    roles = [f"ALTER ROLE {role} PASSWORD '{scram(passwords[role])}'" for role in ("postgres", *ROLES)]
    users = [_set_mlflow_password(name, passwords[f"mlflow_{name}"]) for name in ("admin", USER)]
    _execute(stack, stack.database, "postgres", roles)
    _execute(stack, stack.database, "mlflow_auth", users)
    replace_passwords(stack)


def _set_mlflow_password(user: str, password: str) -> str:
    """Return the SQL that sets a user's password in MLflow's table, because MLflow's API requires the old password."""
    from werkzeug.security import generate_password_hash

    change = f"UPDATE users SET password_hash = '{generate_password_hash(password)}' WHERE username = '{user}'"
    return f"DO $do$ BEGIN IF to_regclass('users') IS NOT NULL THEN {change}; END IF; END $do$"


def check_certificate(stack: Stack) -> None:
    """Check that the config's certificate fits its key, if it names one.

    Raises:
        UserError: they do not fit, or one of the files can't be read.
    """
    if stack.certificate is None or stack.key is None:
        return
    try:
        what = f"certificate = {stack.certificate}, key = {stack.key}"
        ssl.create_default_context().load_cert_chain(stack.certificate, stack.key, password="")
        if stack.authority is not None:
            what = f"authority = {stack.authority}"
            ssl.create_default_context(cafile=str(stack.authority))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{what}: {error.strerror if isinstance(error, OSError) else error}. Name PEM files that this user can "
            f"read: a certificate and its key without a password; or null to let Caddy create a certificate."
        ) from error


def _need_free(part: str, address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {address}, for {part}: {error.strerror}. Stop the program that listens there, or "
                f"change the port in the stack's config."
            ) from error


def _make_cluster(stack: Stack, passwords: dict[str, str]) -> None:
    """Create PostgreSQL's files with a role and a database for each server, completely or not at all.

    A server that does not listen (`--single`) creates the roles, and gets verifiers instead of passwords.
    """
    user = postgres_user(stack)
    try:
        owner = None if user is None else pwd.getpwnam(user).pw_uid
    except KeyError as error:
        raise UserError(f"postgres.user = {user}: this machine has no such user. Run `make stack`.") from error
    draft = stack.folder / "postgres.new"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(mode=0o700)
    if owner is not None:
        os.chown(draft, owner, -1)
        if _run(["test", "-x", str(draft)], user).returncode != 0:
            raise UserError(
                f"{stack.folder}: the user {user}, who runs PostgreSQL, can't reach it. Give others permission to pass "
                f"the folders above it (`chmod o+x`), or set folder in the stack's config, for example to "
                f"/var/lib/tether."
            )
    word = draft.with_name("postgres.word")  # outside the folder of secrets, which PostgreSQL's user can't read
    try:
        write_private(word, passwords["postgres"], owner)
        _checked([
            str(stack.postgres_programs / "initdb"), "-D", str(draft), "-U", "postgres", "-A", "scram-sha-256",
            f"--pwfile={word}", "-E", "UTF8", "--locale=C.UTF-8", "--no-instructions",
        ], user, "")  # fmt: skip
    finally:
        word.unlink(missing_ok=True)
    statements = ["REVOKE ALL ON DATABASE postgres FROM PUBLIC", "REVOKE ALL ON DATABASE template1 FROM PUBLIC"]
    for role in ROLES:
        statements += [
            f"CREATE ROLE {role} LOGIN PASSWORD '{scram(passwords[role])}'",
            f"CREATE DATABASE {role} OWNER {role}",
            f"REVOKE ALL ON DATABASE {role} FROM PUBLIC",
        ]
    _execute(stack, draft, "postgres", statements)
    os.rename(draft, stack.database)


def _execute(stack: Stack, cluster: Path, database: str, statements: Iterable[str]) -> None:
    """Let PostgreSQL execute statements of one line each, in a server process that does not listen."""
    single = [str(stack.postgres_programs / "postgres"), "--single", "-D", str(cluster), database]
    _checked(single, postgres_user(stack), "".join(f"{each};\n" for each in statements))


def _checked(command: list[str], user: str | None, text: str) -> None:
    done = _run(command, user, text)
    errors = [line for line in done.stderr.splitlines() if "ERROR:" in line or "FATAL:" in line]
    if done.returncode != 0 or errors:
        said = (errors or done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise TetherError(f"{Path(command[0]).name} could not make or change the databases: {said}")


def _run(command: list[str], user: str | None, text: str = "") -> "subprocess.CompletedProcess[str]":
    other: dict[str, Any] = {}
    if user is not None:
        other = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        check=False, timeout=300, **other,
    )  # fmt: skip
