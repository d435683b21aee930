"""The equivalence of reward training: the two one-sided tests, and what they refuse to compare."""

import math
from typing import Any

import pytest

from tests.bench.equivalence import SIDES, equivalence, report


def test_the_interval_and_p_are_those_of_a_table_of_t() -> None:
    found = equivalence([-0.002, 0.0, 0.002, 0.004], margin=0.01)
    error = math.sqrt((0.003**2 + 0.001**2 + 0.001**2 + 0.003**2) / 3) / 2
    assert found.mean == pytest.approx(0.001)
    # 2.353363: a table's t, 95 %, 3 degrees of freedom.
    assert (found.low, found.high) == pytest.approx((0.001 - 2.353363 * error, 0.001 + 2.353363 * error))
    assert found.equivalent and found.p < 0.05


def test_p_is_a_twentieth_where_the_interval_just_touches_the_margin() -> None:
    differences = [-0.002, 0.0, 0.002, 0.004]
    edge = equivalence(differences, 1.0).high
    assert equivalence(differences, edge).p == pytest.approx(0.05)
    assert not equivalence(differences, edge * 0.999).equivalent and equivalence(differences, edge * 1.001).equivalent


@pytest.mark.parametrize(
    ("differences", "why"),
    [
        ([0.02, 0.021, 0.019, 0.02], "clearly different"),
        ([-0.03, 0.03, -0.03, 0.03], "equal on average, too uncertain"),
    ],
)
def test_what_differs_or_is_uncertain_is_not_equivalent(differences: list[float], why: str) -> None:
    assert not equivalence(differences, 0.01).equivalent, why
    assert not equivalence([-d for d in differences], 0.01).equivalent, "from below as from above"


def test_one_seed_has_no_verdict() -> None:
    with pytest.raises(ValueError, match="two seeds or more"):
        equivalence([0.0], 0.01)


def run(accuracy: float, loss: float, first: float = 0.7) -> dict[str, Any]:
    """What a side prints."""
    return {"accuracy": accuracy, "loss": loss, "first_loss": first, "seconds": 9.0}


def test_differences_are_ours_less_trls_in_points_and_percent_of_trls_loss() -> None:
    runs = {"trl": [run(0.75, 0.50), run(0.77, 0.40)], "tether": [run(0.755, 0.505), run(0.774, 0.402)]}
    assert set(runs) == set(SIDES)
    lines = report(runs).splitlines()
    assert lines[2] == "| 0 | 0.7500 | 0.7550 | 0.5000 | 0.5050 | 9 | 9 |"
    accuracy, loss = (line for line in lines if "ours less TRL's" in line)
    assert accuracy.startswith("accuracy, ours less TRL's: +0.45 points, 90 % interval [+0.13, +0.77] over 2 seeds")
    assert accuracy.endswith("equivalent") and "±1 points: p = 0.029" in accuracy
    assert loss.startswith("loss, ours less TRL's: +0.75 %, 90 % interval [-0.83, +2.33]")
    assert loss.endswith("NOT SHOWN")


def test_sides_that_start_from_other_weights_are_not_compared() -> None:
    with pytest.raises(ValueError, match=r"seed 1: losses of the first weights: 0\.7, 0\.8"):
        report({"trl": [run(0.7, 0.5)] * 2, "tether": [run(0.7, 0.5), run(0.7, 0.5, first=0.8)]})
