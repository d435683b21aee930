"""Config, passwords, commands and processes of `tether stack`. (With real servers: tests/test_stack_servers.py.)"""

import base64
import hashlib
import hmac
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.base.errors import TetherError, UserError
from components.base.process import describe_process
from flows.deployment import supervision
from flows.deployment.supervision import Service, Supervised
from flows.stack import control, keeper
from flows.stack.checks import Answer
from flows.stack.config import DEFAULT, Stack, load_stack
from flows.stack.control import down, raise_refused
from flows.stack.parts import StackPart, part_names, stack_parts, write_configs
from flows.stack.secrets import NAMES, exports, make_passwords, read_passwords, scram, write_exports, write_files
from flows.stack.state import Adopted, PartState, StackState, read_state, write_state

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def make_stack(tmp_path: Path, **changes: Any) -> Stack:
    """A stack whose programs do nothing."""
    for name in ("programs/bin/caddy", "programs/bin/weed", "pg/initdb", "pg/postgres"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    values = yaml.safe_load(DEFAULT.read_text())
    values |= {"folder": str(tmp_path / "stack"), "programs": str(tmp_path / "programs"), **changes}
    values["postgres"]["programs"] = str(tmp_path / "pg")
    path = tmp_path / "stack.yaml"
    path.write_text(yaml.safe_dump(values))
    return load_stack(path, tmp_path / "home")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workerz": {}}, r"workerz = .*did you mean workers\?"),
        ({"name": "a b; rm"}, r"name = a b; rm: "),
        ({"certificate": "x.pem"}, "certificate, key: give both, or null for both"),
        ({"folder": "/tmp/a b"}, "folder = /tmp/a b: the servers' own config files cannot hold such a path"),
    ],
)
def test_a_mistake_in_the_stacks_config_is_the_users_and_names_the_key(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        make_stack(tmp_path, **changes)


def test_two_parts_on_one_port_are_refused_also_on_those_that_seaweedfs_adds(tmp_path: Path) -> None:
    ports = yaml.safe_load(DEFAULT.read_text())["ports"]
    with pytest.raises(UserError, match=r"ports\.mlflow: 9420 is taken by prefect"):
        make_stack(tmp_path, ports={**ports, "mlflow": ports["prefect"]})
    with pytest.raises(UserError, match=r"19412 is taken by mlflow"):
        make_stack(tmp_path, ports={**ports, "mlflow": ports["s3_server"] + 10_000})


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
    with pytest.raises(UserError, match=r"lacks the passwords prefect, .* Restore that file"):
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
    with pytest.raises(UserError, match=r"^prefect: it does not take it; the passwords in .* restore those\.$"):
        raise_refused(stack, [Answer("s3", "ok", ""), Answer("prefect", "refused", "it does not take it")])


def test_a_program_that_is_not_of_python_sees_no_variable_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    log = tmp_path / "log"
    part = Supervised(Service("env", "", ["env"], environment={"OWN": "1"}, bare=True), log)
    part.process.wait(20)
    lines = log.read_text().splitlines()
    assert "OWN=1" in lines and not [each for each in lines if "secret-of-mine" in each]


def test_a_keeper_that_was_killed_leaves_processes_that_the_next_one_takes_over_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(tmp_path)
    make_passwords(stack)
    stack.logs.mkdir()
    left = subprocess.Popen(SLEEPS, start_new_session=True)
    wanted = [StackPart(Service(name, "", SLEEPS), level) for name, level in (("old", 0), ("new", 1))]
    monkeypatch.setattr(keeper, "stack_parts", lambda *_: wanted)
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.01)
    dead = {**describe_process(os.getpid()), "started": "0"}
    write_state(stack, StackState(keeper=dead, config={}, parts={"old": PartState(process=describe_process(left.pid))}))
    told = threading.Event()
    thread = threading.Thread(target=keeper.keep, args=(stack, told))
    thread.start()
    until = time.monotonic() + 20
    while (state := read_state(stack)) is None or len(state.parts) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert state.parts["old"].process["pid"] == left.pid and state.parts["old"].starts == 1
    new = state.parts["new"].process["pid"]
    told.set()
    thread.join(20)
    assert left.wait(1) == -signal.SIGTERM and not stack.state.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(new, 0)


def test_down_ends_what_a_killed_keeper_left_by_its_own_process_id_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(tmp_path)
    make_passwords(stack)
    monkeypatch.setattr(supervision, "STOP_SECONDS", 5.0)
    ours, other = (subprocess.Popen(SLEEPS, start_new_session=True) for _ in range(2))
    dead = {**describe_process(os.getpid()), "started": "0"}
    reused = {**describe_process(other.pid), "started": "1"}  # the id of a part that is gone, now somebody else's
    parts = {"s3": PartState(process=describe_process(ours.pid)), "tls": PartState(process=reused)}
    write_state(stack, StackState(keeper=dead, config={}, parts=parts))
    try:
        assert down(stack) == ["s3"]
        assert ours.wait(1) == -signal.SIGTERM and other.poll() is None
        assert down(stack) == []
    finally:
        other.kill()
        other.wait()


def test_a_process_of_another_parent_can_be_waited_for() -> None:
    child = subprocess.Popen(SLEEPS)
    adopted = Adopted(describe_process(child.pid))
    with pytest.raises(subprocess.TimeoutExpired):
        adopted.wait(0.05)
    child.kill()
    assert adopted.wait(5) == 0 and adopted.returncode == "unknown"
    child.wait()


@pytest.mark.parametrize("kept", [False, True], ids=["started by this call", "at work before"])
def test_a_stack_that_comes_up_only_in_part_is_ended_unless_it_was_at_work_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    stack = make_stack(tmp_path)
    make_passwords(stack)
    part = subprocess.Popen(SLEEPS, start_new_session=True)
    keeper_of_it = subprocess.Popen(SLEEPS, start_new_session=True)

    def start(stack: Stack, config: Path | None = None) -> None:
        parts = {"s3": PartState(process=describe_process(part.pid))}
        config_of_it = stack.config.model_dump(mode="json")
        write_state(stack, StackState(keeper=describe_process(keeper_of_it.pid), config=config_of_it, parts=parts))

    def fail(*_: Any) -> list[Answer]:
        raise TetherError("mlflow ends each time it is started")

    monkeypatch.setattr(control, "prepare", lambda *_: {})
    monkeypatch.setattr(control, "_start_keeper", start)
    monkeypatch.setattr(control, "_wait", fail)
    if kept:
        start(stack)
    try:
        with pytest.raises(TetherError, match="mlflow ends each time"):
            control.up(stack, tmp_path / "stack.yaml", print)
        assert [each.poll() for each in (part, keeper_of_it)] == ([None, None] if kept else [-signal.SIGTERM] * 2)
    finally:
        for each in (part, keeper_of_it):
            each.kill()
            each.wait()
