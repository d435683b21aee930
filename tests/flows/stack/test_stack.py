"""Config, passwords, commands and processes of `tether stack`. (With real servers: tests/test_stack_servers.py.)"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.base.errors import TetherError, UserError
from components.base.process import describe_process
from flows.deployment import recovery, supervision
from flows.deployment.supervision import Service, Supervised
from flows.stack import control, keeper
from flows.stack.checks import Answer
from flows.stack.config import DEFAULT, Stack
from flows.stack.control import down
from flows.stack.logs import bound_logs, follow, last_line, log_of
from flows.stack.parts import StackPart
from flows.stack.secrets import (
    make_passwords,
)
from flows.stack.state import Adopted, PartState, StackState, read_state, write_state
from tests.stack import make_stack
from tests.waiting import PATIENCE, until

SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workerz": {}}, r"workerz = .*did you mean workers\?"),
        ({"name": "a b; rm"}, r"name = a b; rm: "),
        ({"certificate": "x.pem"}, "certificate, key: give both, or null for both"),
        ({"mlflow_processes": 3}, r"postgres\.connections: 60 are too few .* give at least 76"),
        ({"folder": "/tmp/a b"}, "folder = /tmp/a b: the servers' own config files can't contain such a path"),
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


def test_a_program_that_is_not_of_python_sees_no_variable_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-mine")
    log = tmp_path / "log"
    part = Supervised(Service("env", "", ["env"], environment={"OWN": "1"}, bare=True), log)
    part.process.wait(PATIENCE * 20)
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

    def told_of_both() -> StackState | None:
        state = read_state(stack)
        return state if state is not None and len(state.parts) == 2 else None

    state = until("the keeper says that it has both", told_of_both, 20)
    assert state.parts["old"].process["pid"] == left.pid and state.parts["old"].starts == 1
    new = state.parts["new"].process["pid"]
    told.set()
    thread.join(PATIENCE * 20)
    assert left.wait(PATIENCE * 20) == -signal.SIGTERM and not stack.state.exists()
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
        assert ours.wait(PATIENCE * 10) == -signal.SIGTERM and other.poll() is None
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
    assert adopted.wait(PATIENCE * 5) == 0 and adopted.returncode == "unknown"
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


@pytest.mark.parametrize("room", [True, False], ids=["with room for a copy", "on a full disk"])
def test_a_log_is_emptied_above_its_limit_and_its_part_writes_on_at_its_new_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    stack = make_stack(tmp_path, log_megabytes=0.001)
    stack.logs.mkdir(parents=True)
    path, said = log_of(stack, "s3"), []
    if not room:
        monkeypatch.setattr("shutil.copyfile", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with path.open("ab") as part:
        for text, left in ((b"x" * 1001, b""), (b"y" * 500, b"y" * 500)):
            part.write(text)
            part.flush()
            bound_logs(stack, said.append)
            assert path.read_bytes() == left
    if room:
        assert path.with_suffix(".log.1").read_bytes() == b"x" * 1001 and said == []
    else:
        assert said == [f"{path} is being emptied without a copy: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("written", "said"),
    [("it broke\n", "it broke"), ('{"level": "ERROR", "message": "it broke"}\n', "it broke"), ('["x"]\n', '["x"]')],
)
def test_what_a_part_said_last_is_told_as_text_though_its_log_is_json(tmp_path: Path, written: str, said: str) -> None:
    stack = make_stack(tmp_path)
    stack.logs.mkdir(parents=True)
    log_of(stack, "prefect").write_text(f"before\n{written}")
    assert last_line(stack, "prefect") == f"{said} ({log_of(stack, 'prefect')})"
    lines: list[str] = []
    follow(stack, "prefect", 1, False, lines.append)
    assert lines == [written.strip()], "followed as it is, for whatever reads JSON"


def test_logs_are_followed_past_the_moment_when_one_is_emptied_in_whole_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(tmp_path)
    stack.logs.mkdir(parents=True)
    path, said = log_of(stack, "s3"), []
    path.write_text("one\ntwo\nthree\n")
    writes = iter([("a", "four\nfi"), ("a", "ve\n"), ("w", "six\n")])

    def go_on(_: float) -> None:
        mode, text = next(writes, ("", ""))
        if not mode:
            raise KeyboardInterrupt
        with path.open(mode) as file:
            file.write(text)

    monkeypatch.setattr("time.sleep", go_on)
    with pytest.raises(KeyboardInterrupt):
        follow(stack, "s3", 2, True, said.append)
    assert said == ["two", "three", "four", "five", "six"]
    with pytest.raises(UserError, match=r"s4: the stack has no such part\. It has keeper, postgres, s3"):
        follow(stack, "s4", 2, False, said.append)


def test_the_keeper_has_crashed_runs_of_its_workers_pools_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = make_stack(tmp_path, workers={"cpu": 2, "gpu": 1})
    passwords = make_passwords(stack)
    stack.logs.mkdir()
    asked, told = [], threading.Event()

    def watch(pools: Any, _: Any, url: str, login: str) -> Callable[[], None]:
        asked.append((set(pools), url, login))
        return told.set

    monkeypatch.setattr(recovery, "crash_watch", watch)
    monkeypatch.setattr(keeper, "stack_parts", lambda *_: [])
    monkeypatch.setattr(keeper, "WATCH_SECONDS", 0.01)
    thread = threading.Thread(target=keeper.keep, args=(stack, told))
    thread.start()
    thread.join(PATIENCE * 20)
    told.set()
    here = f"http://127.0.0.1:{stack.config.ports.prefect_server}/api"
    assert asked == [({"cpu", "gpu"}, here, f"tether:{passwords['prefect_api']}")]
