"""A random rank killed, or told to stop, at random moments: the stage computed again ends with undisturbed bytes.

`TETHER_FAULTS_SEED` draws other moments.
"""

import contextlib
import json
import os
import random
import re
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
from tests.components.conftest import folder_digests
from tests.components.distributed.conftest import Launched
from tests.components.distributed.test_launching import ranks_alive
from tests.components.distributed.test_stages import on_ranks
from tests.faults.sample import SEED

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]

STAGES = ("sft", "reward", "ppo", "direct")
RANKS = 2
OPTIONS: dict[str, dict[str, Any]] = {
    "sft": {"checkpoint_every": 1, "epochs": 2},
    "reward": {"checkpoint_every": 1, "members": 2},
    "ppo": {"checkpoint_every": 1, "updates": 4},
    "direct": {"checkpoint_every": 1, "method": "kto"},
}


def computed(stages: Any, stage: str, out: Path) -> Launched:
    return on_ranks(stages, stage, out, RANKS, **OPTIONS[stage])


@pytest.fixture(scope="module")
def undisturbed(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[dict[str, str], float]]:
    """The digests of a stage's artifact, and how long it computes from when its ranks are there."""
    found: dict[str, tuple[dict[str, str], float]] = {}

    def of(stage: str) -> tuple[dict[str, str], float]:
        if stage not in found:
            out = tmp_path_factory.mktemp(stage)
            computed(stages, stage, out)
            begun = (out / "ranks" / "process-0.json").stat().st_mtime
            found[stage] = folder_digests(out / "artifact"), (out / "ranks" / "metrics.json").stat().st_mtime - begun
        return found[stage]

    return of


class Sender(threading.Thread):
    """Sends a signal to a rank, `delay` seconds after it began."""

    def __init__(self, out: Path, rank: int, number: int, delay: float) -> None:
        super().__init__(daemon=True)
        self.path, self.number, self.delay = out / "ranks" / f"process-{rank}.json", number, delay

    def run(self) -> None:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                process = json.loads(self.path.read_text())
                break
            except (OSError, ValueError):
                time.sleep(0.02)
        time.sleep(self.delay)
        with contextlib.suppress(ProcessLookupError):  # it had ended
            os.kill(process["pid"], self.number)


@pytest.fixture
def disturb(
    undisturbed: Any, stages: Any, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Callable[..., None]:
    """Send a signal to a random rank while a stage computes, compute the stage again if that ended it, compare bytes.

    `ended` names how the stage ended, from the rank, the error (`Stopped` or `WorkerDied`) and the stage's folder.
    """

    def run(kind: str, nth: int, number: int, earliest: float, ended: Callable[[int, Exception, Path], str]) -> None:
        chance = random.Random(f"{SEED} {kind} {nth}")
        stage, rank = STAGES[nth % len(STAGES)], chance.randrange(RANKS)
        expected, seconds = undisturbed(stage)
        out, began, outcome = tmp_path / "out", time.monotonic(), "ended before"
        sender = Sender(out, rank, number, chance.uniform(earliest, 1) * seconds)
        sender.start()
        try:
            computed(stages, stage, out)
        except (Stopped, WorkerDied) as error:
            outcome = ended(rank, error, out)
        assert ranks_alive(tmp_path) == []
        if outcome != "ended before":
            shutil.rmtree(out / "artifact", ignore_errors=True)
            computed(stages, stage, out)
        assert folder_digests(out / "artifact") == expected
        where = f"{stage}, rank {rank}, {sender.delay:.1f} s of {seconds:.1f}"
        record_property("outcome", [kind, where, outcome, f"{time.monotonic() - began:.0f}"])

    return run


@pytest.mark.kind("rank killed")
@pytest.mark.parametrize("nth", range(20))
def test_a_rank_killed_at_any_moment_and_the_stage_computed_again_gives_the_same_bytes(
    nth: int, disturb: Callable[..., None]
) -> None:
    def killed(rank: int, error: Exception, out: Path) -> str:
        # Where the other rank does not end in time, the agent is killed before it tells the exit codes.
        said = rf"rank {rank} (was ended by SIGKILL|ended without an error message)"
        assert isinstance(error, WorkerDied) and re.search(said, str(error)), str(error)
        return "killed"

    disturb("rank killed", nth, signal.SIGKILL, 0.0, killed)


@pytest.mark.kind("rank told to stop")
@pytest.mark.parametrize("nth", range(10))
def test_a_rank_told_to_stop_at_any_moment_takes_the_others_with_it(nth: int, disturb: Callable[..., None]) -> None:
    def stopped(rank: int, error: Exception, out: Path) -> str:
        assert isinstance(error, Stopped) and error.number == signal.SIGTERM
        file = out / "ranks" / "observed.jsonl"
        observed = file.read_text().splitlines() if file.exists() else []
        checkpoints = list((out / "checkpoint").rglob("step-*.json"))
        assert bool(checkpoints) == bool(observed), "every step is followed by a checkpoint"
        return f"stopped after {len(observed)} steps"

    disturb("rank told to stop", nth, signal.SIGTERM, 0.3, stopped)
