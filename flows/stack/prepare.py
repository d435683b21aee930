"""What a stack needs before its first start: folders, passwords, config files, a database cluster with its roles."""

import os
import pwd
import shutil
import socket
import subprocess
from collections.abc import Collection
from pathlib import Path
from typing import Any

from components.base.errors import TetherError, UserError
from components.base.files import make_folder
from flows.stack.config import Stack
from flows.stack.parts import postgres_user, stack_parts, write_configs
from flows.stack.secrets import ROLES, make_passwords, scram, write_exports, write_files, write_private


def prepare(stack: Stack, running: Collection[str] = ()) -> dict[str, str]:
    """Make what is not there yet, and see that every port is free; returns the passwords by name.

    Args:
        stack: whose.
        running: parts that run already, and have their ports.

    Raises:
        UserError: a program is not installed, a port is taken, or PostgreSQL's user cannot reach the folder.
    """
    if not (stack.programs / "flask_wtf").is_dir() or not (stack.programs / "psycopg").is_dir():
        raise UserError(f"{stack.programs}: MLflow's database driver is missing. Run `make stack`, which installs it.")
    make_folder(stack.folder)
    for name in ("logs", "prefect", "s3", "tls"):
        make_folder(stack.folder / name)
        (stack.folder / name).chmod(0o700)
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


def _need_free(part: str, address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise UserError(
                f"port {port} of {address}, for {part}: {error.strerror}. End what listens there, or change it in "
                f"the stack's config."
            ) from error


def _make_cluster(stack: Stack, passwords: dict[str, str]) -> None:
    """Make PostgreSQL's files with a role and a database for each server; whole, or not there.

    The roles are made by a server that listens nowhere (`--single`), and get verifiers in the place of passwords.
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
                f"{stack.folder}: the user {user}, who runs PostgreSQL, cannot reach it. Let others pass the folders "
                f"above it (`chmod o+x`), or set folder in the stack's config to a place such as /var/lib/tether."
            )
    word = draft.with_name("postgres.word")  # where its user can read it; the folder of secrets is ours alone
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
    single = [str(stack.postgres_programs / "postgres"), "--single", "-D", str(draft), "postgres"]
    _checked(single, user, "".join(f"{each};\n" for each in statements))
    os.rename(draft, stack.database)


def _checked(command: list[str], user: str | None, text: str) -> None:
    done = _run(command, user, text)
    errors = [line for line in done.stderr.splitlines() if "ERROR:" in line or "FATAL:" in line]
    if done.returncode != 0 or errors:
        said = (errors or done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
        raise TetherError(f"{Path(command[0]).name} could not make the databases: {said}")


def _run(command: list[str], user: str | None, text: str = "") -> "subprocess.CompletedProcess[str]":
    other: dict[str, Any] = {}
    if user is not None:
        other = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    return subprocess.run(
        command, input=text, capture_output=True, text=True, cwd="/", env={"PATH": os.defpath, "LC_ALL": "C.UTF-8"},
        check=False, timeout=300, **other,
    )  # fmt: skip
