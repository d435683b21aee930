"""Faults other than SIGKILL: a full or read-only disk, damaged files, a wall clock that jumps, servers that die.

Each ends in completion or in a clear error after which the same command completes, with the digests of an undisturbed
run; the table at the end says which, and how long recovery took. `TETHER_FAULTS_ONLY=12,15` picks some.
"""

import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from rich.console import Console
from rich.table import Table

from flows.services import free_port
from tests.faults.homes import Done, Home, tail
from tests.faults.test_kills import SEED, WORKERS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(5400)]

DAY = 86_400


class Outcome(NamedTuple):
    """One fault and what came of it."""

    kind: str
    where: str
    ended: str
    seconds: float
    """From the fault's command, or the one after it, to the end of the run."""


@pytest.fixture(scope="module")
def whole(prefect: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home with an undisturbed run."""
    home = Home(tmp_path_factory.mktemp("whole") / "home", prefect)
    done = home.tether()
    assert done.code == 0, tail(done)
    return home


def finish(home: Home, whole: Home, kind: str, where: str, done: Done, planted: bool = True) -> Outcome:
    """What the command that met the fault ended in; if in an error, the same command again must complete."""
    assert done.happened == planted, f"{kind}, {where}: {tail(done)}"
    ended, seconds = "completed", done.seconds
    if done.code != 0:
        lines = done.output.strip().splitlines()
        clear = done.code in (1, 2) and "Traceback" not in done.output and lines[-1].startswith("tether: ")
        assert clear, f"{kind}, {where}: {tail(done)}"
        ended = f"error {done.code}, then completed"
        again = home.tether()
        assert again.code == 0, f"after {kind}, {where}: {tail(again)}"
        seconds = again.seconds
    assert home.digests() == whole.digests(), f"{kind}, {where}"
    return Outcome(kind, where, ended, seconds)


Case = Callable[[Home, Path], Outcome]


def disk(kind: str, code: int, stage: str, phase: str, nth: int, lasting: bool) -> Case:
    """The `nth` change of a phase fails with `code`; with `lasting` all later ones too."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        fault = {"stage": stage, "phase": phase, "nth": nth, "fault": "errno", "errno": code, "lasting": lasting}
        outcome = finish(home, whole, kind, f"{stage}, {phase} {nth}", home.tether(plan=fault))
        home.check()
        return outcome

    return case


def flip(path: Path) -> None:
    """One bit of one byte in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def truncate(path: Path) -> None:
    """Half of it is gone."""
    path.chmod(0o644)
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a flipped bit": flip,
    "a truncated file": truncate,
    "a missing file": Path.unlink,
}


def checkpoint(how: str, suffix: str, stage: str, all_of_them: bool = False) -> Case:
    """A run is killed when it has checkpoints, and the newest (or all) are damaged before it is resumed."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        kill = {"stage": stage, "phase": "publish", "nth": 1, "fault": "kill"}
        killed = home.tether(plan=kill)
        assert killed.code == -9, tail(killed)
        found = sorted(home.path.glob(f"work/*/*/checkpoint/**/*{suffix}"))
        assert found
        for path in found if all_of_them else found[-1:]:
            DAMAGE[how](path)
        which = "every" if all_of_them else "the newest"
        outcome = finish(home, whole, f"checkpoint: {how}", f"{stage}, {which} {suffix}", home.tether(), False)
        home.check()
        return outcome

    return case


def artifact(how: str, stage: str, name: str) -> Case:
    """A file of a published artifact is damaged; its stage is computed again, no other."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before("human_eval", folder)
        (key,) = home.keys(stage)
        record = home.path / "store" / "records" / key
        (sha,) = {
            sha for path, sha in json.loads((record / "1.json").read_text())["record"]["files"].items() if path == name
        }
        DAMAGE[how](home.path / "store" / "objects" / sha)
        outcome = finish(home, whole, f"artifact: {how}", f"{stage}, {name}", home.tether(), False)
        assert {path.parent.name for path in home.path.glob("store/records/*/2.json")} == {key}
        return outcome

    return case


def clock(seconds: float, stage: str, phase: str) -> Case:
    """The wall clock jumps while a stage computes."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "clock", "seconds": seconds}
        outcome = finish(home, whole, "clock", f"{stage}, {phase}: {seconds / DAY:+.0f} d", home.tether(plan=fault))
        home.check()
        return outcome

    return case


@contextmanager
def server(folder: Path, port: int) -> Iterator[Path]:
    """MLflow's server on loopback; yields a note of its processes."""
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    store = [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "1"}
    note = folder / "server.json"
    with (folder / "server.log").open("a") as log:
        process = subprocess.Popen([*command, *store], env=environment, stdout=log, stderr=log, start_new_session=True)
    note.write_text(json.dumps({"servers": [{"pid": process.pid}]}))
    try:
        deadline = time.monotonic() + 90
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                assert time.monotonic() < deadline and process.poll() is None, (folder / "server.log").read_text()
                time.sleep(0.3)
        group = ["ps", "-o", "pid=", "-g", str(process.pid)]
        pids = subprocess.run(group, capture_output=True, text=True, check=True).stdout.split()
        note.write_text(json.dumps({"servers": [{"pid": int(pid)} for pid in pids]}))
        yield note
    finally:
        for each in json.loads(note.read_text())["servers"]:
            with suppress(ProcessLookupError):
                os.kill(each["pid"], signal.SIGKILL)
        process.wait()


def mlflow_dies(stage: str, phase: str) -> Case:
    """MLflow's server is killed in the middle of a stage; the run goes on without it."""

    def case(whole: Home, folder: Path) -> Outcome:
        folder.mkdir()
        home, port = whole.before(stage, folder / "home"), free_port(0)
        home.environment["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{port}"
        with server(folder, port) as note:
            fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "kill", "processes": str(note)}
            outcome = finish(home, whole, "MLflow killed", f"{stage}, {phase}", home.tether(plan=fault))
        return outcome

    return case


def prefect_dies(stage: str, phase: str, delay: float) -> Case:
    """The embedded Prefect server is killed while a stage computes."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        del home.environment["PREFECT_API_URL"]
        notes = str(folder / "prefect" / "embedded" / "*.json")
        fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "kill", "processes": notes, "delay": delay}
        outcome = finish(home, whole, "Prefect killed", f"{stage}, {phase}", home.tether(plan=fault))
        home.check()
        return outcome

    return case


MODEL = "model/model.safetensors"
CASES: list[Case] = [
    disk("disk full", errno.ENOSPC, "validate", "write", 5, False),
    disk("disk full", errno.ENOSPC, "sft", "checkpoint", 4, True),
    disk("disk full", errno.ENOSPC, "sft", "commit", 2, False),
    disk("disk full", errno.ENOSPC, "reward", "publish", 3, True),
    disk("disk full", errno.ENOSPC, "reward", "checkpoint", 4, False),
    disk("disk full", errno.ENOSPC, "ppo", "checkpoint", 5, True),
    disk("disk full", errno.ENOSPC, "ppo", "status", 2, False),
    disk("disk full", errno.ENOSPC, "human_eval", "write", 2, True),
    disk("read-only store", errno.EROFS, "validate", "publish", 1, True),
    disk("read-only store", errno.EROFS, "sft", "publish", 2, True),
    disk("read-only store", errno.EROFS, "reward", "commit", 1, True),
    disk("read-only store", errno.EROFS, "ppo", "view", 1, True),
    *(checkpoint(how, ".safetensors", stage) for how in DAMAGE for stage in ("sft", "ppo")),
    checkpoint("a truncated file", ".json", "reward"),
    checkpoint("a flipped bit", ".safetensors", "reward", all_of_them=True),
    artifact("a flipped bit", "validate", "pairs.train.jsonl"),
    artifact("a missing file", "validate", "prompts.train.jsonl"),
    *(artifact(how, stage, MODEL) for how in DAMAGE for stage in ("sft", "reward")),
    clock(DAY, "sft", "checkpoint"),
    clock(-DAY, "reward", "checkpoint"),
    clock(-DAY, "ppo", "checkpoint"),
    clock(DAY, "human_eval", "write"),
    mlflow_dies("sft", "checkpoint"),
    mlflow_dies("reward", "publish"),
    mlflow_dies("ppo", "checkpoint"),
    prefect_dies("sft", "checkpoint", 0.0),
    prefect_dies("reward", "publish", 0.0),
    prefect_dies("reward", "checkpoint", 0.5),
    prefect_dies("ppo", "checkpoint", 0.0),
    prefect_dies("human_eval", "write", 0.0),
]


def test_a_fault_ends_in_completion_or_a_clear_error_and_never_in_another_result(whole: Home, tmp_path: Path) -> None:
    assert len(CASES) >= 40
    only = os.environ.get("TETHER_FAULTS_ONLY", "")
    order = [(i, case) for i, case in enumerate(CASES) if not only or str(i) in only.split(",")]
    random.Random(SEED).shuffle(order)  # so that two at once are of two kinds

    def one(numbered: tuple[int, Case]) -> Outcome | str:
        number, case = numbered
        try:
            return case(whole, tmp_path / str(number))
        except Exception as error:  # a failed assertion among them: the others are to be seen too
            return f"case {number}: {type(error).__name__}: {error}"

    with ThreadPoolExecutor(WORKERS) as pool:
        found = list(pool.map(one, order))
    table = Table("kind", "where", "outcome", "seconds to the end")
    for outcome in sorted(each for each in found if isinstance(each, Outcome)):
        table.add_row(outcome.kind, outcome.where, outcome.ended, f"{outcome.seconds:.0f}")
    print()
    Console(width=150).print(table)
    failed = [each for each in found if isinstance(each, str)]
    assert not failed, "\n\n".join(failed)
