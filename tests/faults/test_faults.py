"""Faults other than SIGKILL: a full or read-only disk, damaged files, a wall clock that jumps, servers that die.

Each ends in completion or in a clear error after which the same command completes, with the digests of an undisturbed
run; the table at the end says which, and how long recovery took.
"""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.faults.homes import Done, Home, Moment, tail
from tests.servers import MlflowServer
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(PATIENCE * 900)]

DAY = 86_400


class Outcome(NamedTuple):
    """Where a fault was, and what came of it."""

    where: str
    ended: str
    seconds: float
    """From the fault's command, or the one after it, to the end of the run."""


def finish(home: Home, whole: Home, where: str, done: Done, planted: bool = True, check: bool = True) -> Outcome:
    """What the command that met the fault ended in; if in an error, the same command again must complete.

    With `check` the home then keeps its rules.
    """
    assert done.happened == planted, f"{where}: {tail(done)}"
    ended, seconds = "completed", done.seconds
    if done.code != 0:
        lines = done.output.strip().splitlines()
        clear = done.code in (1, 2) and "Traceback" not in done.output and lines[-1].startswith("tether: ")
        assert clear, f"{where}: {tail(done)}"
        ended = f"error {done.code}, then completed"
        again = home.tether()
        assert again.code == 0, f"after {where}: {tail(again)}"
        seconds = again.seconds
    assert home.digests() == whole.digests(), where
    if check:
        home.check()
    return Outcome(where, ended, seconds)


Case = Callable[[Home, Path], Outcome]


def disk(code: int, stage: str, phase: str, nth: int, lasting: bool) -> Case:
    """The `nth` change of a phase fails with `code`; with `lasting` all later ones too."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        fault = {"stage": stage, "phase": phase, "nth": nth, "fault": "errno", "errno": code, "lasting": lasting}
        return finish(home, whole, f"{stage}, {phase} {nth}", home.tether(plan=fault))

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
        return finish(home, whole, f"{stage}, {which} {suffix}: {how}", home.tether(), False)

    return case


def artifact(how: str, stage: str, name: str) -> Case:
    """A file of a published artifact is damaged; its stage is computed again, no other."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before("human_eval", folder)
        (key,) = home.keys(stage)
        record = home.path / "store" / "records" / key
        (file,) = record.glob("1.*.json")
        sha = json.loads(file.read_text())["record"]["files"][name]
        DAMAGE[how](home.path / "store" / "objects" / sha)
        outcome = finish(home, whole, f"{stage}, {name}: {how}", home.tether(), False, check=False)
        assert {path.parent.name for path in home.path.glob("store/records/*/2.*.json")} == {key}
        return outcome

    return case


def clock(seconds: float, stage: str, phase: str) -> Case:
    """The wall clock jumps while a stage computes."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "clock", "seconds": seconds}
        return finish(home, whole, f"{stage}, {phase}: {seconds / DAY:+.0f} d", home.tether(plan=fault))

    return case


def mlflow_dies(stage: str, phase: str) -> Case:
    """MLflow's server is killed in the middle of a stage; the run goes on without it."""

    def case(whole: Home, folder: Path) -> Outcome:
        folder.mkdir()
        home, server = whole.before(stage, folder / "home"), MlflowServer(folder).start()
        home.environment["MLFLOW_TRACKING_URI"] = server.uri
        try:
            fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "kill", "processes": server.pids()}
            return finish(home, whole, f"{stage}, {phase}", home.tether(plan=fault), check=False)
        finally:
            server.kill()

    return case


def prefect_dies(stage: str, phase: str, delay: float) -> Case:
    """The embedded Prefect server is killed while a stage computes."""

    def case(whole: Home, folder: Path) -> Outcome:
        home = whole.before(stage, folder)
        del home.environment["PREFECT_API_URL"]
        fault = {"stage": stage, "phase": phase, "nth": 1, "fault": "kill", "processes": "create_app", "delay": delay}
        return finish(home, whole, f"{stage}, {phase}", home.tether(plan=fault))

    return case


MODEL = "model/model.safetensors"
CASES: dict[str, list[Case]] = {
    "disk full": [
        disk(errno.ENOSPC, "validate", "write", 5, False),
        disk(errno.ENOSPC, "sft", "checkpoint", 4, True),
        disk(errno.ENOSPC, "sft", "commit", 2, False),
        disk(errno.ENOSPC, "reward", "publish", 3, True),
        disk(errno.ENOSPC, "reward", "checkpoint", 4, False),
        disk(errno.ENOSPC, "ppo", "checkpoint", 5, True),
        disk(errno.ENOSPC, "ppo", "status", 2, False),
        disk(errno.ENOSPC, "human_eval", "write", 2, True),
    ],
    "read-only store": [
        disk(errno.EROFS, "validate", "publish", 1, True),
        disk(errno.EROFS, "sft", "publish", 2, True),
        disk(errno.EROFS, "reward", "commit", 1, True),
        disk(errno.EROFS, "ppo", "view", 1, True),
    ],
    "checkpoint damaged": [
        *(checkpoint(how, ".safetensors", stage) for how in DAMAGE for stage in ("sft", "ppo")),
        checkpoint("a truncated file", ".json", "reward"),
        checkpoint("a flipped bit", ".safetensors", "reward", all_of_them=True),
    ],
    "artifact damaged": [
        artifact("a flipped bit", "validate", "pairs.train/00000.arrow"),
        artifact("a missing file", "validate", "prompts.train/00000.arrow"),
        *(artifact(how, stage, MODEL) for how in DAMAGE for stage in ("sft", "reward")),
    ],
    "clock": [
        clock(DAY, "sft", "checkpoint"),
        clock(-DAY, "reward", "checkpoint"),
        clock(-DAY, "ppo", "checkpoint"),
        clock(DAY, "human_eval", "write"),
    ],
    "MLflow killed": [
        mlflow_dies("sft", "checkpoint"),
        mlflow_dies("reward", "publish"),
        mlflow_dies("ppo", "checkpoint"),
    ],
    "Prefect killed": [
        prefect_dies("sft", "checkpoint", 0.0),
        prefect_dies("reward", "publish", 0.0),
        prefect_dies("reward", "checkpoint", 0.5),
        prefect_dies("ppo", "checkpoint", 0.0),
        prefect_dies("human_eval", "write", 0.0),
    ],
}
"""By kind, of which a sample has some each."""


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, id=f"{kind}-{number}", marks=pytest.mark.kind(kind))
        for kind, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_fault_ends_in_completion_or_a_clear_error_and_never_in_another_result(
    kind: str, case: Case, whole: tuple[Home, list[Moment]], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    outcome = case(whole[0], tmp_path / "case")
    record_property("outcome", [kind, outcome.where, outcome.ended, f"{outcome.seconds:.0f}"])
