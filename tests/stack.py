"""A `tether stack` of a test: real servers in a clean folder, on ports of their own, with passwords that are known."""

import base64
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.base.errors import UserError
from flows.stack.checks import ask_all, request
from flows.stack.config import DEFAULT, Stack, load_stack
from flows.stack.secrets import NAMES, USER, exports, read_passwords
from flows.stack.state import StackState, read_state, runs
from tests.servers import clean_environment
from tests.waiting import until

PLANTED = {name: f"gepflanzt-4711-{number}" for number, name in enumerate(NAMES)}
WORD = b"gepflanzt-4711"
ROOT = DEFAULT.parents[1]
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def _in_base64(word: bytes) -> list[bytes]:
    """What base64 makes of a word wherever it stands in a text, less what depends on its neighbours."""
    return [base64.b64encode(b"\0" * skip + word)[-(-skip * 4 // 3) : len(word) * 4 // 3 // 4 * 4] for skip in range(3)]


_FORMS = [WORD, *_in_base64(WORD)]


def leaks(text: bytes) -> bool:
    """Whether a planted password is in a text, as it is or as in a header of basic auth."""
    return any(form in text for form in _FORMS)


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


class Running:
    """A stack in a folder of its own, commands on it, and runs through its pools."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.config, self.home = folder / "stack.yaml", folder / "home"
        values = yaml.safe_load(DEFAULT.read_text())
        values |= {"folder": str(folder / "stack"), "mlflow_processes": 1, "workers": {"cpu": 1}}
        values["ports"] = free_ports(list(values["ports"]))
        self.said = b""
        self.change(**{**values, **changes})
        self.stack.secrets.mkdir(parents=True)
        (self.stack.secrets / "passwords.json").write_text(json.dumps(PLANTED))
        (self.stack.secrets / "passwords.json").chmod(0o600)

    def change(self, **values: Any) -> None:
        """Write values into its config."""
        before = yaml.safe_load(self.config.read_text()) if self.config.exists() else {}
        self.config.write_text(yaml.safe_dump({**before, **values}))
        self.stack: Stack = load_stack(self.config, self.home)

    def command(self, *words: str) -> "subprocess.CompletedProcess[bytes]":
        """`tether stack`."""
        return self._run(["stack", *words, "--config", str(self.config)], TETHER_HOME=str(self.home))

    def client_without_stack(self, *words: str) -> "subprocess.CompletedProcess[bytes]":
        """`tether` in a terminal that has this home alone."""
        return self._run(list(words), TETHER_HOME=str(self.home))

    def client(self, *words: str, **variables: str) -> "subprocess.CompletedProcess[bytes]":
        """`tether` in a terminal that has what `up` says it needs."""
        return self._run(list(words), **{**exports(self.stack, self.passwords), **variables})

    def _run(self, words: list[str], **variables: str) -> "subprocess.CompletedProcess[bytes]":
        began = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", *words], capture_output=True,
            env={**clean_environment(), "COLUMNS": "200", "PYTHONPATH": str(ROOT), **variables},
        )  # fmt: skip
        print(f"{time.monotonic() - began:6.1f} s  tether {' '.join(words[:2])}")
        self.said += done.stdout + done.stderr
        return done

    @property
    def passwords(self) -> dict[str, str]:
        """Those of now."""
        return read_passwords(self.stack)

    def state(self) -> StackState:
        """What its keeper says."""
        state = read_state(self.stack)
        assert state is not None
        return state

    def pids(self) -> dict[str, int]:
        """The process of each part."""
        return {name: part.process["pid"] for name, part in self.state().parts.items()}

    def all_answer(self) -> bool:
        """Whether they do, each asked with its password."""
        return all(each.verdict == "ok" for each in ask_all(self.stack, self.passwords))

    def has_risen(self, part: str, pid: int) -> bool:
        """Whether a part has another process than `pid`, which runs."""
        return self.pids()[part] != pid and runs(self.state().parts[part].process)

    def prefect(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What Prefect's API answers."""
        return request(self.stack, f"{self.stack.url('prefect')}/api/{path}", USER, self.passwords["prefect_api"], body)

    def mlflow(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """What MLflow's API answers."""
        url = f"{self.stack.url('mlflow')}/api/2.0/mlflow/{path}"
        return request(self.stack, url, USER, self.passwords["mlflow_tether"], body)

    def deploy(self) -> None:
        """`tether deploy tiny`, with every stage in the pipeline's own process."""
        done = self.client("deploy", "tiny", "--set", "runners.ppo=local")
        assert done.returncode == 0, (done.stdout + done.stderr).decode()

    def begin(self, updates: int | None = None, **changes: Any) -> str:
        """Order a run of what was deployed; returns its id."""
        deployment = self.prefect("deployments/name/rlhf/tiny")
        config = {**deployment["parameters"]["config"], **changes}
        if updates is not None:
            config["ppo"] |= {"updates": updates}
        parameters = {"profile": "tiny", "config": config}
        run = self.prefect(f"deployments/{deployment['id']}/create_flow_run", {"parameters": parameters})
        found: str = run["id"]
        return found

    def ended(self, run: str, seconds: float = 300) -> dict[str, Any]:
        """The flow run once it has ended for good, which a crashed one that is tried again has not."""

        def look() -> dict[str, Any] | None:
            flow: dict[str, Any] = self.prefect(f"flow_runs/{run}")
            return flow if flow["state_type"] in ENDED and flow["state_type"] != "CRASHED" else None

        return until("the run has ended", look, seconds)


@contextmanager
def started(**changes: Any) -> Iterator[Running]:
    """A stack that is up, in a clean folder; skips where its programs are not installed.

    With TETHER_KEEP_STACK=1 the folder, and with it the logs, stays.
    """
    folder = Path(tempfile.mkdtemp(prefix="tether-stack-"))
    folder.chmod(0o755)  # PostgreSQL is another user's, where root runs the tests
    try:
        running = Running(folder, **changes)
        try:
            _ = running.stack.program("weed"), running.stack.program("caddy"), running.stack.postgres_programs
        except UserError as error:
            pytest.skip(str(error))
        try:
            up = running.command("up")
            assert up.returncode == 0, (up.stderr + up.stdout).decode()
            yield running
        finally:
            running.command("down")
    finally:
        if os.environ.get("TETHER_KEEP_STACK") != "1":
            shutil.rmtree(folder, ignore_errors=True)


def other_addresses() -> list[str]:
    """The addresses of this machine that are not on loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return []
        return [probe.getsockname()[0]]


def listens(address: str, port: int) -> bool:
    """Whether something takes connections there."""
    try:
        socket.create_connection((address, port), timeout=2).close()
    except OSError:
        return False
    return True
