"""SIGKILL within `tether iterate`: the same command again makes the round that it would have been, and no other."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.homes import STAGES, Home, Moment, tail
from tests.faults.sample import SEED
from tests.faults.test_kills import kill
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(PATIENCE * 900)]

KILLS = 10
"""Two in each stage."""


@pytest.fixture(scope="module")
def round_one(
    whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Home, Home, list[Moment]]:
    """A home whose policy was judged, a copy of it in which nothing disturbed the next round, and that round's
    moments."""
    judged, trace = whole[0], tmp_path_factory.mktemp("iterate") / "trace.jsonl"
    undisturbed = judged.copy(trace.parent / "home")
    done = undisturbed.tether("iterate", judged.status()["run"], plan={"trace": str(trace)})
    assert done.code == 0, tail(done)
    undisturbed.check()
    moments = [json.loads(line)[:3] for line in trace.read_text().splitlines()]
    return judged, undisturbed, [(stage, phase, nth) for stage, phase, nth in moments]


def rounds(home: Home) -> set[tuple[str, str]]:
    """The round of each run that came to its end, and whose policy was judged before it."""
    runs = [json.loads(path.read_text()) for path in home.path.glob("runs/*/run.json")]
    ended = [run["origin"] for run in runs if run["stages"][-1]["state"] in ("passed", "cached")]
    return {(origin.get("round", "0"), origin.get("votes", "")) for origin in ended}


@pytest.mark.parametrize(
    "nth", [pytest.param(n, id=f"iterate-{n}", marks=pytest.mark.kind("killed iterate")) for n in range(KILLS)]
)
def test_a_killed_iterate_makes_the_same_round_when_it_is_run_again(
    nth: int, round_one: tuple[Home, Home, list[Moment]], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    judged, undisturbed, moments = round_one
    stage, chance = STAGES[nth % len(STAGES)], random.Random(f"{SEED} iterate {nth}")
    last = {phase: number for where, phase, number in moments if where == stage}
    phase = chance.choice(sorted(last))
    moment = (stage, phase, chance.randint(1, last[phase]))
    home, command = judged.copy(tmp_path / "home"), ("iterate", judged.status()["run"])
    killed = home.tether(*command, plan=kill(moment, 0.0))
    if killed.code == 0:  # MLflow is told by a thread, so that such a moment need not come: the first of them does
        home = judged.copy(tmp_path / "again")
        moment = (stage, phase, 1)
        killed = home.tether(*command, plan=kill(moment, 0.0))
    where = f"{stage}, {phase} {moment[2]}"
    assert killed.code == -9, f"{where}: {tail(killed)}"
    again = home.tether(*command)
    assert again.code == 0, f"{where}: {tail(again)}"
    assert rounds(home) == rounds(undisturbed) == {("0", ""), ("1", judged.status()["run"])}, where
    assert home.digests() == undisturbed.digests(), where
    home.check()
    record_property("outcome", ["killed iterate", where, "completed", f"{again.seconds:.0f}"])
