"""Passwords and certificates of `tether stack`, and how passwords are changed."""

import base64
import fcntl
import hashlib
import hmac
import json
import os
import subprocess
from pathlib import Path

import pytest

from components.base.errors import TetherError, UserError
from components.base.process import describe_process
from flows.stack import control, prepare
from flows.stack.checks import Answer
from flows.stack.config import Stack
from flows.stack.control import raise_refused
from flows.stack.parts import part_names, stack_parts, write_configs
from flows.stack.prepare import rotate
from flows.stack.secrets import (
    NAMES,
    exports,
    make_passwords,
    next_file,
    next_passwords,
    read_passwords,
    scram,
    write_exports,
    write_files,
)
from flows.stack.state import PartState, StackState, write_state
from tests.certificates import make_certificate
from tests.stack import make_stack


def test_what_postgresql_keeps_of_a_password_is_rfc_7677s_example() -> None:
    """Its client's proof and its server's signature hold with the two keys; section 3, password `pencil`."""
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    salt = "W22ZaJ0SNY7soEsUEjb6gQ=="
    message = f"n=user,r=rOprNGfwEbeRWgbNEkqO,r={nonce},s={salt},i=4096,c=biws,r={nonce}".encode()
    kind, how, keys = scram("pencil", base64.b64decode(salt)).split("$")
    assert (kind, how) == ("SCRAM-SHA-256", f"4096:{salt}")
    stored, server = map(base64.b64decode, keys.split(":"))
    assert base64.b64encode(hmac.digest(server, message, "sha256")) == b"6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    proof = base64.b64decode("dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")
    client = bytes(a ^ b for a, b in zip(proof, hmac.digest(stored, message, "sha256"), strict=True))
    assert hashlib.sha256(client).digest() == stored


def test_passwords_stand_in_files_that_only_their_owner_reads_and_in_no_command_or_other_file(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    before = os.umask(0)
    try:
        passwords = make_passwords(stack)
        write_files(stack, passwords)
        write_exports(stack, passwords)
        write_configs(stack)
    finally:
        os.umask(before)
    assert set(passwords) == set(NAMES) and len(set(passwords.values())) == len(NAMES)
    assert make_passwords(stack) == passwords, "made once"
    holders = {path for path in stack.folder.rglob("*") if path.is_file()}
    private = {path for path in holders if any(each in path.read_text() for each in passwords.values())}
    assert {path.stat().st_mode & 0o777 for path in private} == {0o600} and len(private) == 5
    commands = " ".join(word for part in stack_parts(stack, passwords) for word in part.service.command or [])
    assert [name for name, each in passwords.items() if each in commands] == []
    assert [part.service.name for part in stack_parts(stack, passwords)] == part_names(stack)


def test_passwords_that_others_can_read_or_that_the_databases_do_not_know_are_refused(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    make_passwords(stack)
    path = stack.secrets / "passwords.json"
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"others can read the passwords \(mode 644\)\. Run `chmod 600"):
        read_passwords(stack)
    path.chmod(0o600)
    stack.database.mkdir()
    path.write_text(json.dumps({"postgres": "abc"}))
    with pytest.raises(UserError, match=r"the passwords prefect, .* are missing.* Restore that file"):
        make_passwords(stack)


def test_the_exports_mean_the_same_to_a_shell(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    passwords = make_passwords(stack)
    write_exports(stack, passwords)
    shell = subprocess.run(
        ["sh", "-c", f". {stack.exports}; env -0"], env={}, capture_output=True, text=True, check=True
    )
    found = dict(each.split("=", 1) for each in shell.stdout.split("\0") if each)
    assert found.items() >= exports(stack, passwords).items()


def test_wrong_credentials_are_one_sentence_and_the_users_mistake(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    raise_refused(stack, [Answer("s3", "away", "does not answer")])
    with pytest.raises(
        UserError, match=r"^prefect: it does not take it; the passwords in .* restore the original passwords\.$"
    ):
        raise_refused(stack, [Answer("s3", "ok", ""), Answer("prefect", "refused", "it does not take it")])


def test_passwords_are_not_changed_while_the_stack_runs_or_has_none(tmp_path: Path) -> None:
    stack = make_stack(tmp_path)
    with pytest.raises(UserError, match="there are no databases yet"):
        rotate(stack)
    passwords = make_passwords(stack)
    stack.database.mkdir()
    with stack.lock.open("a") as keeper_of_it:
        fcntl.flock(keeper_of_it, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="`tether stack down` first"):
            rotate(stack)
    here = describe_process(os.getpid())
    dead = {**here, "started": "0"}
    write_state(stack, StackState(keeper=dead, config={}, parts={"s3": PartState(process=here)}))
    with pytest.raises(UserError, match=r"s3 of the stack runs\. `tether stack down` first"):
        rotate(stack)
    assert make_passwords(stack) == passwords and not next_file(stack).exists()


def test_a_change_of_passwords_that_fails_keeps_the_old_ones_and_is_ended_with_the_same_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL has taken some of the new ones by then."""
    stack = make_stack(tmp_path)
    before, told = make_passwords(stack), []
    stack.database.mkdir()

    def execute(_: Stack, cluster: Path, database: str, statements: list[str]) -> None:
        told.append((database, statements))
        if len(told) == 2:
            raise TetherError("postgres could not")

    monkeypatch.setattr(prepare, "_execute", execute)
    with pytest.raises(TetherError, match="postgres could not"):
        rotate(stack)
    wanted = next_passwords(stack)
    assert read_passwords(stack) == before and not set(wanted.values()) & set(before.values())
    rotate(stack)
    assert read_passwords(stack) == wanted and not next_file(stack).exists()
    assert [database for database, _ in told] == ["postgres", "mlflow_auth"] * 2
    assert all(each in stack.exports.read_text() for each in (wanted["prefect_api"], wanted["s3_tether"]))
    text = str(told)
    assert [name for name, each in {**before, **wanted}.items() if each in text] == [], "verifiers alone"
    assert {path.stat().st_mode & 0o777 for path in stack.secrets.iterdir()} == {0o600}


def test_a_certificate_that_cannot_be_used_is_the_users_mistake_and_one_of_a_private_authority_is_trusted(
    tmp_path: Path,
) -> None:
    authority, certificate, key = make_certificate(tmp_path, "localhost")
    _, other, _ = make_certificate(tmp_path / "other", "localhost")
    for cert, signer, told in (
        (tmp_path / "none.pem", authority, r"certificate = .*none\.pem, key = .*: No such file"),
        (other, authority, r"certificate = .*: .*(?i:mismatch)"),
        (certificate, key, r"authority = .*key\.pem: "),
    ):
        stack = make_stack(tmp_path, certificate=str(cert), key=str(key), authority=str(signer))
        with pytest.raises(UserError, match=told):
            prepare.check_certificate(stack)
    stack = make_stack(tmp_path, certificate=str(certificate), key=str(key), authority=str(authority))
    prepare.check_certificate(stack)
    stack.folder.mkdir()
    control.write_authorities(stack)
    assert authority.read_text() in (stack.folder / "ca.crt").read_text()
    assert exports(stack, make_passwords(stack))["SSL_CERT_FILE"] == str(stack.folder / "ca.crt")
    public = make_stack(tmp_path / "public", certificate=str(certificate), key=str(key))
    assert "SSL_CERT_FILE" not in exports(public, make_passwords(public))
    with pytest.raises(UserError, match="authority: it needs a certificate that it signed"):
        make_stack(tmp_path, authority=str(authority))
