"""How many pairs the learning curve says it takes."""

import math

import pytest
from scipy.special import expit

from tests.bench.learning_curve import needed, table

SIZES = [500, 1000, 2000]


def point(accuracy, length=0.52, width=0.01):
    return {
        "reward/accuracy": accuracy, "reward/accuracy_low": accuracy - width, "reward/accuracy_high": accuracy + width,
        "reward/length_accuracy": length,
    }  # fmt: skip


def on_a_line(slope):
    """Points exactly on logit(accuracy) = 0.1 + slope log2(pairs / 500)."""
    return [point(float(expit(0.1 + slope * i))) for i in range(3)]


def test_points_on_the_fitted_line_give_its_crossing():
    wanted = float(expit(0.1 + 0.1 * 5)) - 0.52
    it = needed(SIZES, on_a_line(0.1), wanted)
    assert it.pairs == pytest.approx(500 * 2**5, rel=1e-3)
    assert it.low < it.pairs < it.high


def test_a_flat_curve_promises_no_number_of_pairs():
    assert needed(SIZES, on_a_line(-0.02), 0.1).pairs == math.inf
    assert needed(SIZES, on_a_line(0.0), 0.2).high == math.inf


def test_a_point_that_is_surer_weighs_more():
    points = on_a_line(0.1)
    off = [*points[:2], point(points[2]["reward/accuracy"] + 0.05, width=0.05)]
    nearer, further = (needed(SIZES, each, 0.05).pairs for each in (off, [*off[:2], point(off[2]["reward/accuracy"])]))
    true = needed(SIZES, points, 0.05).pairs
    assert abs(math.log(nearer / true)) < abs(math.log(further / true))


def test_a_size_is_a_line_of_the_table():
    full = point(0.6) | {f"reward/{n}": 0.5 for n in (
        "length_gain_low", "balanced_length_accuracy_low", "ece", "ece_null_95", "calibration_slope", "brier",
        "temperature")}  # fmt: skip
    assert table([700], [full]).splitlines()[-1].startswith("| 700 | 0.600 | 0.590 | 0.610 | 0.520 |")
