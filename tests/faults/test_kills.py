"""SIGKILL at moments drawn over all stages and over publish, record and gate: the same command again finishes the run.

`TETHER_FAULTS_SEED` draws other moments, `TETHER_FAULTS_KILLS` more or fewer of them.
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.faults.homes import STAGES, Home, Moment, tail
from tests.faults.sample import SAMPLE, SEED
from tests.waiting import PATIENCE

CHAINS = -(-int(os.environ.get("TETHER_FAULTS_KILLS", "10" if SAMPLE else "60")) // len(STAGES))
LATER = 0.5
"""Seconds: up to so long after its moment a third of the kills comes, in the middle of computing."""
EACH = {"write", "checkpoint", "publish", "commit", "view", "record", "run", "status"}
"""Phases in which some kill comes, in two chains already."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(PATIENCE * 900)]


def draw(moments: Sequence[Moment], seed: str, chains: int) -> list[list[Moment]]:
    """For each chain a moment of each stage, in order, of one of the phases that were drawn least often.

    In order of their names: how far the thread that tells MLflow is differs from trace to trace.
    """
    chance, drawn = random.Random(seed), Counter[str]()
    last = {(stage, phase): nth for stage, phase, nth in sorted(moments)}
    found = []
    for _ in range(chains):
        chain = []
        for stage in STAGES:
            phases = [phase for where, phase in sorted(last) if where == stage]
            fewest = min(drawn[phase] for phase in phases)
            phase = chance.choice([each for each in phases if drawn[each] == fewest])
            drawn[phase] += 1
            chain.append((stage, phase, chance.randint(1, last[stage, phase])))
        found.append(chain)
    return found


@pytest.mark.parametrize("chain", range(CHAINS))
def test_a_run_killed_at_any_moment_ends_the_same(
    chain: int, whole: tuple[Home, list[Moment]], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    undisturbed, moments = whole
    chains, chance = draw(moments, SEED, CHAINS), random.Random(f"{SEED} {chain}")
    assert {phase for each in chains for _, phase, _ in each} >= EACH or CHAINS == 1
    home = Home(tmp_path / "home", undisturbed.environment)
    kills: list[str] = []
    for stage, phase, nth in chains[chain]:
        delay = chance.random() * LATER if chance.random() < 1 / 3 else 0.0
        done = home.tether(plan=kill((stage, phase, nth), delay))
        if done.code == 0:  # the moment did not come, or the run had ended before the delay was over
            assert home.digests() == undisturbed.digests(), f"after {kills}"
            home = undisturbed.before(stage, tmp_path / stage)
            nth, delay = 1, 0.0
            done = home.tether(plan=kill((stage, phase, nth), delay))
        where = f"{stage}, {phase} {nth}" + (f" + {delay:.1f} s" if delay else "")
        assert done.code == -9, f"after {kills}, at {where}: {tail(done)}"
        kills.append(where)
    done = home.tether()
    assert done.code == 0, f"after {kills}: {tail(done)}"
    assert home.digests() == undisturbed.digests(), f"after {kills}"
    home.check()
    record_property("outcome", ["killed", "; ".join(kills), "completed", f"{done.seconds:.0f}"])


def kill(moment: Moment, delay: float) -> dict[str, object]:
    """What `inject.py` is to do."""
    return dict(zip(("stage", "phase", "nth"), moment, strict=True)) | {"fault": "kill", "delay": delay}
