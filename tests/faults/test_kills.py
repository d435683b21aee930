"""SIGKILL at moments drawn over all stages and over publish, record and gate: the same command again finishes the run.

`TETHER_FAULTS_SEED` draws other moments, `TETHER_FAULTS_KILLS` more or fewer of them.
"""

import json
import os
import random
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.homes import STAGES, Home, tail

SEED = int(os.environ.get("TETHER_FAULTS_SEED", "0"))
KILLS = int(os.environ.get("TETHER_FAULTS_KILLS", "60"))
LATER = 0.5
"""Seconds: up to so long after its moment a third of the kills comes, in the middle of computing."""
EACH = {"write", "checkpoint", "publish", "commit", "record", "status"}
"""Phases in which some kill must come; up to twice `KILLS` are drawn for it."""
WORKERS = min(2, len(os.sched_getaffinity(0)))

pytestmark = [pytest.mark.faults, pytest.mark.timeout(5400)]

Moment = tuple[str, str, int]
"""Stage, phase, and how manieth of these."""


@pytest.fixture(scope="module")
def undisturbed(prefect: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Home, list[Moment]]:
    """A run in which nothing happens, and its moments in order."""
    folder = tmp_path_factory.mktemp("undisturbed")
    home, trace = Home(folder / "home", prefect), folder / "trace.jsonl"
    done = home.tether(plan={"trace": str(trace)})
    assert done.code == 0, tail(done)
    home.check()
    return home, [tuple(json.loads(line)[:3]) for line in trace.read_text().splitlines()]


def draw(moments: list[Moment], chance: random.Random) -> list[Moment]:
    """A moment of each stage, in order, of a phase drawn first, so that none is rare.

    In order of their names: how far the thread that tells MLflow is differs from trace to trace.
    """
    by_phase: dict[tuple[str, str], list[Moment]] = defaultdict(list)
    for moment in sorted(moments):
        by_phase[moment[:2]].append(moment)
    return [chance.choice(by_phase[chance.choice([where for where in by_phase if where[0] == s])]) for s in STAGES]


def killed_again_and_again(
    home: Home, moments: list[Moment], wanted: dict[str, str], chance: random.Random
) -> list[tuple[str, str, int, float]]:
    """Run the command, killed at each of `moments`, and then to its end. Returns the kills, each with its delay."""
    kills = []
    for stage, phase, nth in moments:
        delay = chance.random() * LATER if chance.random() < 1 / 3 else 0.0
        done = home.tether(plan={"stage": stage, "phase": phase, "nth": nth, "fault": "kill", "delay": delay})
        if done.code != -9:  # the moment did not come, or the run had ended before the delay was over
            break
        kills.append((stage, phase, nth, round(delay, 2)))
    else:
        done = home.tether()
    assert done.code == 0, f"after {kills}: {tail(done)}"
    assert home.digests() == wanted, f"after {kills}"
    home.check()
    return kills


def test_a_run_killed_at_any_moment_ends_the_same(undisturbed: tuple[Home, list[Moment]], tmp_path: Path) -> None:
    whole, moments = undisturbed
    wanted, chance = whole.digests(), random.Random(SEED)
    print(f"\nTETHER_FAULTS_SEED={SEED}, {len(moments)} moments in an undisturbed run")
    kills: list[tuple[str, str, int, float]] = []
    while len(kills) < KILLS or (len(kills) < 2 * KILLS and not {kill[1] for kill in kills} >= EACH):
        seeds = [chance.random() for _ in range(max(1, -(-(KILLS - len(kills)) // len(STAGES))))]

        def chain(seed: float) -> list[tuple[str, str, int, float]]:
            own = random.Random(seed)
            return killed_again_and_again(
                Home(tmp_path / str(seed), whole.environment), draw(moments, own), wanted, own
            )

        with ThreadPoolExecutor(WORKERS) as pool:
            for found in pool.map(chain, seeds):
                kills += found
                print(*(f"killed: {s}, {phase} {nth}, {delay} s later" for s, phase, nth, delay in found), sep="\n")
    where = {kill[:2] for kill in kills}
    print(f"{len(kills)} kills in {len(where)} places; every run ended with the undisturbed digests")
    assert {stage for stage, _ in where} == set(STAGES)
    assert {phase for _, phase in where} >= EACH
