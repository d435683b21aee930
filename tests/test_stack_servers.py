"""`tether stack` with real servers in a clean folder: PostgreSQL, SeaweedFS, Caddy, Prefect, MLflow, a worker."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from components.base.errors import UserError
from flows.stack.checks import Refused, ask_all, request, s3_files
from flows.stack.config import DEFAULT, Stack, load_stack
from flows.stack.parts import part_names
from flows.stack.secrets import NAMES, exports, read_passwords
from flows.stack.state import StackState, read_state, runs
from tests.servers import clean_environment

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

PLANTED = {name: f"gepflanzt-4711-{number}" for number, name in enumerate(NAMES)}
WORD = b"gepflanzt-4711"


def free_ports(names: list[str]) -> dict[str, int]:
    """A free port for each name, whose double (10000 more) is free too."""
    found: dict[str, int] = {}
    while len(found) < len(names):
        port = random.randrange(20_000, 50_000)
        try:
            for each in (port, port + 10_000):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
        except OSError:
            continue
        if not any(abs(port - other) in (0, 10_000) for other in found.values()):
            found[names[len(found)]] = port
    return found


class Running:
    """A stack in a folder of its own, and commands on it."""

    def __init__(self, folder: Path) -> None:
        values = yaml.safe_load(DEFAULT.read_text())
        values |= {"folder": str(folder / "stack"), "mlflow_processes": 1, "workers": {"cpu": 1}}
        values["ports"] = free_ports(list(values["ports"]))
        self.config, self.home = folder / "stack.yaml", folder / "home"
        self.config.write_text(yaml.safe_dump(values))
        self.stack: Stack = load_stack(self.config, self.home)
        self.said = b""

    def command(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
        """`tether stack`."""
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "stack", *words, "--config", str(self.config)], capture_output=True,
            env={**clean_environment(), "TETHER_HOME": str(self.home), "COLUMNS": "200", **variables},
        )  # fmt: skip
        self.said += done.stdout + done.stderr
        return done

    def state(self) -> StackState:
        state = read_state(self.stack)
        assert state is not None
        return state

    def pids(self) -> dict[str, int]:
        return {name: part.process["pid"] for name, part in self.state().parts.items()}

    def wait_until_all_answer(self) -> None:
        until = time.monotonic() + 240
        while wrong := [each for each in ask_all(self.stack, PLANTED) if each.verdict != "ok"]:
            assert time.monotonic() < until, wrong
            time.sleep(1)


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    folder = Path(tempfile.mkdtemp(prefix="tether-stack-"))
    folder.chmod(0o755)  # PostgreSQL is another user's, where root runs the tests
    running = Running(folder)
    try:
        _ = running.stack.program("weed"), running.stack.program("caddy"), running.stack.postgres_programs
    except UserError as error:
        pytest.skip(str(error))
    running.stack.secrets.mkdir(parents=True)
    (running.stack.secrets / "passwords.json").write_text(json.dumps(PLANTED))
    (running.stack.secrets / "passwords.json").chmod(0o600)
    try:
        began = time.monotonic()
        up = running.command("up")
        print(f"{time.monotonic() - began:6.1f} s  the stack is up")
        assert up.returncode == 0, (up.stderr + up.stdout).decode()
        yield running
    finally:
        running.command("down")
        shutil.rmtree(folder, ignore_errors=True)


def test_up_waits_until_every_part_answers_and_says_where_it_is(running: Running) -> None:
    names = part_names(running.stack)
    assert list(running.pids()) == names
    said = running.said.decode()
    assert all(f"{name} answers: " in said for name in names)
    assert running.stack.url("prefect") in said and f". {running.stack.exports}" in said
    status = running.command("status")
    assert status.returncode == 0, status.stderr.decode()


def test_no_server_answers_a_question_without_its_password(running: Running) -> None:
    prefect, mlflow = running.stack.url("prefect"), running.stack.url("mlflow")
    for user, password in ((None, ""), ("tether", "wrong")):
        with pytest.raises(Refused):
            request(running.stack, f"{prefect}/api/flow_runs/count", user, password, {})
        with pytest.raises(Refused):
            request(running.stack, f"{mlflow}/api/2.0/mlflow/experiments/search?max_results=1", user, password)
    with pytest.raises(PermissionError):
        s3_files(running.stack, "tether", "wrong").ls("tether")
    with pytest.raises(PermissionError):  # each identity has its own bucket
        s3_files(running.stack, "tether", PLANTED["s3_tether"]).ls("mlflow")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(f"http://127.0.0.1:{running.stack.config.ports.s3_server}/tether")


def test_the_exports_reach_the_store_and_mlflows_artifacts_through_tls(running: Running, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("kept")
    code = (
        "import uuid, mlflow\n"
        "from components.store.store import ArtifactStore\n"
        "from pathlib import Path\n"
        "place = ArtifactStore(Path('home')).place\n"
        "assert place.create('probe', b'1') and not place.create('probe', b'2') and place.read('probe') == b'1'\n"
        "mlflow.set_experiment('stack')\n"
        "with mlflow.start_run() as run: mlflow.log_artifact('note.txt')\n"
        "print(mlflow.artifacts.load_text(run.info.artifact_uri + '/note.txt'))\n"
    )
    environment = {**clean_environment(), **exports(running.stack, PLANTED)}
    here = str(DEFAULT.parents[1])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env={**environment, "PYTHONPATH": here}, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and "kept" in done.stdout, done.stderr


def test_a_run_keeps_its_results_facts_and_states_in_the_stack(running: Running) -> None:
    began = time.monotonic()
    environment = {**clean_environment(), **exports(running.stack, PLANTED)}
    command = [sys.executable, "-m", "flows.cli", "run", "tiny"]
    done = subprocess.run(command, env=environment, capture_output=True)
    print(f"{time.monotonic() - began:6.1f} s  a tiny run")
    assert done.returncode == 0, (done.stdout + done.stderr).decode()[-3000:]
    running.said += done.stdout + done.stderr
    assert len(s3_files(running.stack, "tether", PLANTED["s3_tether"]).glob("tether/store/records/*/*.json")) >= 5
    flows = {"flows": {"name": {"any_": ["rlhf"]}}}
    prefect = f"{running.stack.url('prefect')}/api/flow_runs/filter"
    [flow] = request(running.stack, prefect, "tether", PLANTED["prefect_api"], flows)
    assert flow["state_name"] == "Completed"
    mlflow = f"{running.stack.url('mlflow')}/api/2.0/mlflow"
    everywhere = request(
        running.stack, f"{mlflow}/experiments/search?max_results=100", "tether", PLANTED["mlflow_tether"]
    )
    body = {"experiment_ids": [each["experiment_id"] for each in everywhere["experiments"]], "max_results": 100}
    found = request(running.stack, f"{mlflow}/runs/search", "tether", PLANTED["mlflow_tether"], body)["runs"]
    assert sum(each["info"]["status"] == "FINISHED" for each in found) >= 6, "the pipeline's and its five stages'"


@pytest.mark.parametrize("part", ["postgres", "s3", "tls", "mlflow"])
def test_a_part_that_is_killed_is_started_again_alone(running: Running, part: str) -> None:
    before = running.pids()
    os.kill(before[part], signal.SIGKILL)
    until = time.monotonic() + 120
    while running.pids()[part] == before[part] or not runs(running.state().parts[part].process):
        assert time.monotonic() < until
        time.sleep(0.2)
    running.wait_until_all_answer()
    after = running.pids()
    assert {name for name in before if after[name] != before[name]} == {part}


def test_a_second_up_starts_only_what_is_missing(running: Running) -> None:
    """The keeper was killed, and with it nothing watches the parts any more."""
    before, keeper = running.pids(), running.state().keeper["pid"]
    os.kill(keeper, signal.SIGKILL)
    os.kill(before["tls"], signal.SIGKILL)
    status = running.command("status")
    assert status.returncode == 1 and b"tls: has ended; `tether stack up` starts it" in status.stderr
    assert b"Traceback" not in status.stderr
    assert running.command("up").returncode == 0
    after = running.pids()
    assert {name for name in before if after[name] != before[name]} == {"tls"}
    assert running.state().keeper["pid"] != keeper


@pytest.mark.parametrize("name", ["prefect_api", "mlflow_tether", "s3_tether", "prefect"])
def test_a_wrong_password_is_one_sentence_that_names_the_part(running: Running, name: str) -> None:
    path = running.stack.secrets / "passwords.json"
    path.write_text(json.dumps({**PLANTED, name: "another-word-of-mine"}))
    try:
        status = running.command("status")
    finally:
        path.write_text(json.dumps(PLANTED))
    assert status.returncode == 2
    [sentence] = status.stderr.decode().splitlines()
    part = {"s3_tether": "s3", "prefect": "postgres"}.get(name, name.partition("_")[0])
    assert sentence.startswith(f"tether: {part}") and "does not take the " in sentence
    assert b"another-word" not in status.stdout + status.stderr


def test_no_password_is_in_a_log_a_command_line_or_what_is_printed(running: Running) -> None:
    running.command("logs", "--no-follow", "--lines", "100000")
    assert WORD not in running.said
    logs = list(running.stack.logs.glob("*.log"))
    assert len(logs) == len(part_names(running.stack)) + 1 and all(path.stat().st_size for path in logs[:1])
    assert [str(path) for path in logs if WORD in path.read_bytes()] == []
    commands = {path: _bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")}
    folder = str(running.stack.folder).encode()
    assert any(folder in text for text in commands.values()), "ours are among them"
    assert [str(path) for path, text in commands.items() if WORD in text] == []
    readable = [path for path in running.stack.folder.rglob("*") if path.is_file() and path.stat().st_mode & 0o077]
    assert readable and [str(path) for path in readable if WORD in path.read_bytes()] == []
    assert read_passwords(running.stack) == PLANTED


def test_down_leaves_no_process_and_keeps_the_data(running: Running) -> None:
    state = running.state()
    down = running.command("down")
    assert down.returncode == 0 and b"Ended postgres, s3, prefect, mlflow, tls, worker-cpu." in down.stdout
    assert not any(runs(each.process) for each in [*state.parts.values()]) and not runs(state.keeper)
    folder = str(running.stack.folder).encode()
    until = time.monotonic() + 20  # PostgreSQL's children
    while left := {path.parent.name: _bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline")}:
        left = {
            pid: text for pid, text in left.items() if folder in text or (b"postgres:" in text and _here(pid, running))
        }
        if not left:
            break
        assert time.monotonic() < until, left
    assert (running.stack.database / "PG_VERSION").exists()
    status = running.command("status")
    assert status.returncode == 1 and b"Nothing of the stack" in status.stderr


def _here(pid: str, running: Running) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/cwd") == str(running.stack.database)
    except OSError:
        return False


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
