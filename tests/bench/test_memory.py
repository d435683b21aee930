"""The plan's memory against a process's: the small configuration of the bench, whole."""

from pathlib import Path

import pytest

from tests.bench.memory import BAR, compared

pytestmark = pytest.mark.whole


def test_the_plan_of_a_small_ppo_is_near_what_its_process_takes_at_its_peak(tmp_path: Path) -> None:
    found = compared("small", tmp_path)
    assert found["phase"] == "policy update" and abs(found["error"]) < BAR, found
