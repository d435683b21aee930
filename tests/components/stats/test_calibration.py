import json
from typing import Any

import numpy as np
import pytest
from scipy.special import expit

from components.stats.calibration.calibration_metrics import (
    calibration,
    ece_interval,
    equal_mass_bins,
    equal_width_bins,
    expected_calibration_error,
    fit_temperature,
    temperature_at_end,
)
from components.stats.calibration.slope import SLOPE_CAP, recalibration_slope


def described(*arguments: Any, **options: Any) -> dict[str, Any]:
    return calibration(*arguments, **options).document()


def simulated_margins(rng: np.random.Generator, n: int, temperature: float = 1.0) -> np.ndarray:
    """Margins, chosen first, of a model whose logits are the true ones times 1 / `temperature`."""
    true = rng.normal(scale=1.5, size=n)
    return np.where(rng.random(n) < expit(true), true, -true) / temperature


def test_temperature_and_slope_recover_what_the_simulation_put_in() -> None:
    rng = np.random.default_rng(0)
    assert fit_temperature(simulated_margins(rng, 40_000, 1.0)) == pytest.approx(1.0, abs=0.04)
    overconfident = simulated_margins(rng, 40_000, 0.5)
    assert fit_temperature(overconfident) == pytest.approx(2.0, abs=0.08)
    slope = recalibration_slope(overconfident, range(40_000))
    assert slope.slope == pytest.approx(0.5, abs=0.02)
    assert slope.low < 0.5 < slope.high and slope.high - slope.low < 0.05
    # The two are one estimate: the likelihood of sigmoid(d / T) is that of a slope 1 / T.
    assert 1 / fit_temperature(overconfident) == pytest.approx(slope.slope, rel=1e-5)


def test_slope_is_the_logistic_regression_of_symmetrised_pairs() -> None:
    from sklearn.linear_model import LogisticRegression

    d = simulated_margins(np.random.default_rng(1), 500, 0.7)
    symmetrised = np.concatenate([d, -d])[:, None]
    labels = np.repeat([1, 0], d.size)
    fitted = LogisticRegression(C=np.inf, fit_intercept=False, tol=1e-10).fit(symmetrised, labels).coef_[0, 0]
    assert recalibration_slope(d, range(d.size)).slope == pytest.approx(fitted, rel=1e-4)


def test_a_perfect_model_lies_within_its_null_95_percent_of_the_time() -> None:
    rng = np.random.default_rng(2)
    reports = [described(simulated_margins(rng, 600), range(600), 1.0, seed, draws=100) for seed in range(200)]
    within = np.mean([r["ece"] <= r["ece_null_95"] for r in reports])
    assert 0.91 <= within <= 0.99
    covered = np.mean([r["slope_low"] <= 1.0 <= r["slope_high"] for r in reports])
    assert 0.91 <= covered <= 0.99
    assert 0.90 <= np.mean([r["ece_width"] <= r["ece_width_null_95"] for r in reports]) <= 0.99
    # The true Brier score and log loss of sigmoid(N(0, 1.5^2)) by quadrature.
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    p, weights = expit(1.5 * nodes), weights / weights.sum()
    truth = {"brier": weights @ (p * (1 - p)), "log_loss": -weights @ (p * np.log(p) + (1 - p) * np.log(1 - p))}
    for name, true in truth.items():
        assert 0.90 <= np.mean([r[f"{name}_low"] <= true <= r[f"{name}_high"] for r in reports]) <= 0.99, name
    # The floor is why an ECE never stands alone: here a perfect model's 95th percentile is above 0.05.
    assert 0.05 < np.mean([r["ece_null_95"] for r in reports]) < 0.09


def test_an_overconfident_model_is_outside_its_null_and_temperature_brings_it_back() -> None:
    rng = np.random.default_rng(3)
    fitted_on, test = simulated_margins(rng, 3000, 0.5), simulated_margins(rng, 3000, 0.5)
    raw = described(test, range(3000), 1.0, seed=0)
    assert raw["ece"] > 2 * raw["ece_null_95"] and raw["ece_low"] > raw["ece_null_95"]
    assert raw["calibration_slope"] == pytest.approx(0.5, abs=0.06)
    fixed = described(test, range(3000), fit_temperature(fitted_on), seed=0)
    assert fixed["ece"] < fixed["ece_null_95"] and fixed["calibration_slope"] == pytest.approx(1.0, abs=0.12)
    assert fixed["log_loss_high"] < fixed["log_loss_before_high"] and fixed["ece_width"] < fixed["ece_width_before"]
    assert fixed["log_loss"] < fixed["log_loss_before"] and fixed["brier"] < fixed["brier_before"]
    assert fixed["ece_before"] == raw["ece"] and fixed["accuracy"] == raw["accuracy"]


def test_storing_the_chosen_response_first_does_not_make_a_perfect_model_look_bad() -> None:
    rng = np.random.default_rng(4)
    true = rng.normal(scale=1.5, size=4000)
    outcome = rng.random(4000) < expit(true)  # whether the pair's first response wins, in random order
    random_order = np.maximum(expit(true), expit(-true))
    chosen_first = described(np.where(outcome, true, -true), range(4000), 1.0, seed=0)
    right = np.where(true > 0, outcome, ~outcome).astype(float)
    expected = expected_calibration_error(random_order, right, equal_mass_bins(random_order, 10))
    assert chosen_first["ece"] == pytest.approx(expected, abs=1e-12)
    naive = np.abs(1 - expit(np.where(outcome, true, -true))).mean()  # p against a label that is always 1
    assert naive > 0.25 > 10 * chosen_first["ece"]


def test_hand_computed_report() -> None:
    # sigmoid(log 3) = 3/4: four pairs said with 0.75, three of them right; one tie, said with a half, counts a half.
    report = described([np.log(3)] * 3 + [-np.log(3), 0.0], range(5), 1.0, seed=0, bins=2)
    assert report["accuracy"] == pytest.approx(3.5 / 5)
    assert report["ece"] == pytest.approx(0.0, abs=1e-12)
    assert report["brier"] == pytest.approx((3 / 16 + 9 / 16 + 1 / 4) / 5)
    assert report["log_loss"] == pytest.approx((3 * np.log(4 / 3) + np.log(4) + np.log(2)) / 5)
    assert report["calibration_slope"] == pytest.approx(1.0)
    assert [b["n"] for b in report["bins"]] == [1, 4]
    assert report["bins"][1]["accuracy"] == pytest.approx(0.75)
    hot = described([np.log(9)] * 4, range(4), 2.0, seed=0, bins=1)
    assert hot["ece"] == pytest.approx(0.25) and hot["ece_before"] == pytest.approx(0.1)


def test_all_right_all_wrong_and_all_tied_have_no_finite_slope_and_say_so() -> None:
    right = described([1.0, 2.0, 0.5], range(3), 1.0, seed=0)
    assert right["calibration_slope"] == SLOPE_CAP and right["slope_capped"] and right["slope_low"] is None
    assert right["accuracy"] == 1.0 and right["accuracy_low"] < 0.5
    wrong = described([-1.0, -2.0], range(2), 1.0, seed=0)
    assert wrong["calibration_slope"] == -SLOPE_CAP and wrong["slope_capped"]
    a_little = [described(each, range(2), 1.0, seed=0) for each in ([0.1, 0.2], [-0.1, -0.2])]
    assert [each["calibration_slope"] for each in a_little] == [SLOPE_CAP, -SLOPE_CAP], "however small the margins"
    tied = described([0.0, 0.0], range(2), 1.0, seed=0)
    assert np.isnan(tied["calibration_slope"]) and tied["ece"] == tied["ece_null_95"] == 0.0
    assert temperature_at_end(fit_temperature([1.0, 2.0])) and temperature_at_end(fit_temperature([-1.0, -2.0]))
    assert not temperature_at_end(fit_temperature([1.0, 2.0, -1.0]))


def test_rows_of_one_prompt_widen_the_intervals() -> None:
    d = np.repeat(simulated_margins(np.random.default_rng(5), 200), 10)
    alone = described(d, range(2000), 1.0, seed=0)
    together = described(d, np.repeat(np.arange(200), 10).tolist(), 1.0, seed=0)
    for low, high in (("accuracy_low", "accuracy_high"), ("ece_low", "ece_high"), ("slope_low", "slope_high")):
        assert together[high] - together[low] > 1.8 * (alone[high] - alone[low])
    assert together["prompts"] == 200 and together["pairs"] == 2000


def test_the_report_is_repeatable_ignores_row_order_and_is_json() -> None:
    d = np.round(simulated_margins(np.random.default_rng(6), 300), 1)  # many equal confidences
    clusters = [i % 90 for i in range(300)]
    report = described(d, clusters, 1.3, seed=7)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert described(d, clusters, 1.3, seed=7) == report
    turned = described(d[::-1], clusters[::-1], 1.3, seed=7)
    for name in ("accuracy", "accuracy_low", "ece", "calibration_slope", "slope_low", "brier", "log_loss"):
        assert turned[name] == pytest.approx(report[name], abs=1e-9), name
    assert turned["ece_null_95"] == pytest.approx(report["ece_null_95"], abs=0.01)


def test_bins_of_equal_width_run_from_a_half_to_1() -> None:
    confidence = np.array([0.5, 0.599, 0.6001, 0.75, 0.95, 1.0])
    assert equal_width_bins(confidence, 5).tolist() == [0, 0, 1, 2, 4, 4]


def test_few_overconfident_pairs_among_many_sure_ones_have_a_bin_of_their_own_by_width() -> None:
    """40 pairs said with 0.65 are right half of the time; 960 said with 0.95 are right as often as said."""
    d = np.concatenate([np.full(40, np.log(0.65 / 0.35)), np.full(960, np.log(19.0))])
    signs = np.concatenate([np.tile([1, -1], 20), np.where(np.arange(960) < 912, 1, -1)])
    found = described(d * signs, range(1000), 1.0, seed=0)
    assert found["ece_width"] == pytest.approx(0.04 * 0.15, abs=1e-9)
    assert [each["n"] for each in found["bins_width"]] == [40, 960]


def test_bins_hold_equal_mass_and_never_split_equal_confidences() -> None:
    assert np.bincount(equal_mass_bins(np.random.default_rng(8).random(1000), 10)).tolist() == [100] * 10
    assert np.unique(equal_mass_bins(np.full(100, 0.7), 10)).size == 1


@pytest.mark.parametrize("margins", [[], [float("nan")], [float("inf"), 1.0]])
def test_unusable_margins_are_refused(margins: list[float]) -> None:
    with pytest.raises(ValueError, match="finite margins"):
        fit_temperature(margins)
    with pytest.raises(ValueError, match="finite margins"):
        described(margins, range(len(margins)), 1.0, seed=0)


def test_the_lower_end_of_an_ece_has_2_5_percent_of_the_resamples_below_it() -> None:
    """Of 7 prompts 3 are wrong: none of these is drawn in (4/7)^7 = 1.99 % of resamples, where ECE is 0."""
    wrong = np.array([1.0, 1, 1, 0, 0, 0, 0])
    one_bin, codes = np.zeros(7, np.int64), np.arange(7)
    low, high = ece_interval(np.ones(7), 1 - wrong, one_bin, codes, seed=0, draws=40_000)
    assert low == pytest.approx(1 / 7), "2.5 % is more than 1.99 %"
    assert high == pytest.approx(6 / 7), "six or more are drawn in 2.7 % of resamples, seven in 0.3 %"
