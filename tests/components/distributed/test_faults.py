"""A random rank killed, or told to stop, at random moments: the stage computed again ends with undisturbed bytes.

`TETHER_FAULTS_SEED` draws other moments.
"""

import hashlib
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import WorkerDied
from components.distributed.launching import Stopped
from tests.components.distributed.conftest import Launched
from tests.components.distributed.test_launching import ranks_alive
from tests.components.distributed.test_stages import on_ranks
from tests.faults.sample import SEED

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

STAGES = ("sft", "reward", "ppo")
RANKS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"checkpoint_every": 1, "epochs": 2},
    "reward": {"checkpoint_every": 1, "members": 2},
    "ppo": {"checkpoint_every": 1, "updates": 4},
}


def digest(out: Path) -> str:
    """sha256 of an artifact's files."""
    found = hashlib.sha256()
    for path in sorted((out / "artifact").rglob("*")):
        if path.is_file():
            found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


def computed(stages: Any, stage: str, out: Path) -> Launched:
    return on_ranks(stages, stage, out, RANKS, **OPTIONS[stage])


@pytest.fixture(scope="module")
def undisturbed(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, float]]:
    """The digest of a stage's artifact, and how long it computes from when its ranks are there."""
    found: dict[str, tuple[str, float]] = {}

    def of(stage: str) -> tuple[str, float]:
        if stage not in found:
            out = tmp_path_factory.mktemp(stage)
            computed(stages, stage, out)
            begun = (out / "ranks" / "process-0.json").stat().st_mtime
            found[stage] = digest(out), (out / "ranks" / "metrics.json").stat().st_mtime - begun
        return found[stage]

    return of


class Sender(threading.Thread):
    """Sends a signal to a rank, `delay` seconds after it began."""

    def __init__(self, out: Path, rank: int, number: int, delay: float) -> None:
        super().__init__(daemon=True)
        self.path, self.number, self.delay = out / "ranks" / f"process-{rank}.json", number, delay
        self.sent = False

    def run(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                process = json.loads(self.path.read_text())
                break
            except (OSError, ValueError):
                time.sleep(0.02)
        time.sleep(self.delay)
        try:
            os.kill(process["pid"], self.number)
            self.sent = True
        except ProcessLookupError:  # it had ended
            pass


@pytest.mark.kind("rank killed")
@pytest.mark.parametrize("nth", range(20))
def test_a_rank_killed_at_any_moment_and_the_stage_computed_again_gives_the_same_bytes(
    nth: int, undisturbed: Any, stages: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(f"{SEED} kill {nth}")
    stage, rank = STAGES[nth % 3], chance.randrange(RANKS)
    expected, seconds = undisturbed(stage)
    out, began = tmp_path / "out", time.monotonic()
    sender = Sender(out, rank, signal.SIGKILL, chance.uniform(0, seconds))
    sender.start()
    try:
        computed(stages, stage, out)
        outcome = "ended before"
    except WorkerDied as error:
        assert f"rank {rank} was ended by SIGKILL" in str(error)
        outcome = "killed"
    assert ranks_alive(tmp_path) == []
    if outcome == "killed":
        shutil.rmtree(out / "artifact", ignore_errors=True)
        computed(stages, stage, out)
    assert digest(out) == expected
    where = f"{stage}, rank {rank}, {sender.delay:.1f} s of {seconds:.1f}"
    record_property("outcome", ["rank killed", where, outcome, f"{time.monotonic() - began:.0f}"])


@pytest.mark.kind("rank told to stop")
@pytest.mark.parametrize("nth", range(10))
def test_a_rank_told_to_stop_at_any_moment_takes_the_others_with_it(
    nth: int, undisturbed: Any, stages: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    chance = random.Random(f"{SEED} stop {nth}")
    stage, rank = STAGES[nth % 3], chance.randrange(RANKS)
    expected, seconds = undisturbed(stage)
    out, began = tmp_path / "out", time.monotonic()
    sender = Sender(out, rank, signal.SIGTERM, chance.uniform(0.3, 1) * seconds)
    sender.start()
    try:
        computed(stages, stage, out)
        outcome = "ended before"
    except Stopped as stopped:
        assert stopped.number == signal.SIGTERM
        observed = (out / "ranks" / "observed.jsonl").read_text().splitlines()
        checkpoints = list((out / "checkpoint").rglob("step-*.json"))
        assert bool(checkpoints) == bool(observed), "every step is followed by a checkpoint"
        outcome = f"stopped after {len(observed)} steps"
    assert ranks_alive(tmp_path) == []
    if outcome != "ended before":
        shutil.rmtree(out / "artifact", ignore_errors=True)
        computed(stages, stage, out)
    assert digest(out) == expected
    where = f"{stage}, rank {rank}, {sender.delay:.1f} s of {seconds:.1f}"
    record_property("outcome", ["rank told to stop", where, outcome, f"{time.monotonic() - began:.0f}"])
