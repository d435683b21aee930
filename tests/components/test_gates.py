"""A gate stops what it should stop, and says by how much."""

import math

import pytest
from pydantic import ValidationError

from components.errors import TetherError, UserError
from components.gates import GATES, GatesConfig, Waiver, check_waivers, failure, judge

PROBES = ("filler", "flattery", "hedge", "repetition", "whitespace", "exclamations", "dots")
REWARD = {
    "accuracy_low": 0.7,
    "ece": 0.05,
    "calibration_slope": (0.8, 1.25),
    "length_gain_low": 0.0,
    "invariance": 1e-4,
    "ece_width": 0.05,
    "brier_high": 0.2,
    "log_loss_high": 0.6,
    "majority_gain_low": 0.1,
    "probe_texts": 500,
    "slice_accuracy_low": 0.5,
    "slice_ece_excess": 0.0,
    "balanced_length_accuracy_low": 0.5,
    "length_partial_correlation_high": 0.3,
    "position_invariance": 1e-4,
    "disagreement_auroc_low": 0.8,
    "refresh_gain_low": -0.03,
    **{f"probe_{name}_high": 0.25 for name in PROBES},
}
GOOD = {
    "reward/accuracy_low": 0.72,
    "reward/ece": 0.03,
    "reward/ece_null_95": 0.02,
    "reward/calibration_slope": 1.0,
    "reward/length_gain_low": 0.1,
    "reward/invariance": 1e-5,
    "reward/ece_width": 0.06,
    "reward/ece_width_null_95": 0.07,
    "reward/brier_high": 0.2,
    "reward/log_loss_high": 0.59,
    "reward/majority_gain_low": 0.15,
    "reward/probe_texts": 500.0,
    "reward/slice_accuracy_low": 0.55,
    "reward/slice_ece_excess": -0.01,
    "reward/balanced_length_accuracy_low": 0.6,
    "reward/length_partial_correlation_high": 0.2,
    "reward/position_invariance": 0.0,
    "reward/disagreement_auroc_low": 0.9,
    "reward/refresh_gain_low": -0.03,
    **{f"reward/probe_{name}_high": 0.1 for name in PROBES},
}


def all_off():
    off = {}
    for gate in GATES.values():
        off.setdefault(gate.stage, {})[gate.short] = None
    return off


def verdict(name, metrics, thresholds=REWARD, waivers=()):
    return {each.name: each for each in judge("reward", metrics, thresholds, waivers)}[name]


def test_good_metrics_pass_every_gate():
    verdicts = judge("reward", GOOD, REWARD)
    assert len(verdicts) == len(REWARD) == 24
    assert all(each.passed for each in verdicts)
    assert failure("reward", verdicts) is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["accuracy_low", "ece", "calibration_slope"])
def test_a_metric_that_is_not_finite_fails_in_either_direction(name, value):
    found = verdict(f"reward.{name}", {**GOOD, f"reward/{name}": value})
    assert not found.passed
    assert found.value is None
    assert found.stops


def test_a_missing_metric_fails_and_says_so():
    metrics = {name: value for name, value in GOOD.items() if name != "reward/accuracy_low"}
    found = verdict("reward.accuracy_low", metrics)
    assert found.stops
    assert "missing" in found.text


def test_the_gate_of_what_not_every_run_does_is_off_without_its_metric_and_fails_on_one_that_is_unknown():
    nothing = {name: value for name, value in GOOD.items() if name != "reward/refresh_gain_low"}
    found = verdict("reward.refresh_gain_low", nothing)
    assert found.passed and found.threshold is None
    for value in (math.nan, -0.031):
        assert verdict("reward.refresh_gain_low", {**GOOD, "reward/refresh_gain_low": value}).stops


def test_the_failure_names_metric_value_and_threshold():
    error = failure("reward", judge("reward", {**GOOD, "reward/accuracy_low": 0.6875}, REWARD))
    assert error is not None
    assert error.exit_code == 3
    for part in ("reward.accuracy_low", "reward/accuracy_low", "0.6875", "0.7"):
        assert part in str(error)
    assert "reward.ece" not in str(error)


@pytest.mark.parametrize(
    ("ece", "null", "passes"), [(0.04, 0.01, True), (0.06, 0.07, True), (0.08, 0.07, False), (0.06, math.nan, False)]
)
def test_ece_may_be_above_its_threshold_only_within_its_null(ece, null, passes):
    assert verdict("reward.ece", {**GOOD, "reward/ece": ece, "reward/ece_null_95": null}).passed is passes


@pytest.mark.parametrize(("slope", "passes"), [(0.79, False), (0.8, True), (1.25, True), (1.26, False)])
def test_between_holds_at_both_ends(slope, passes):
    assert verdict("reward.calibration_slope", {**GOOD, "reward/calibration_slope": slope}).passed is passes


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_without_evidence_fails_its_gate_and_one_above_its_threshold_fails_no_other(name):
    nothing = {metric: value for metric, value in GOOD.items() if metric != f"reward/probe_{name}_high"}
    for metrics in (nothing, {**GOOD, f"reward/probe_{name}_high": 0.26}):
        failed = [each.name for each in judge("reward", metrics, REWARD) if each.stops]
        assert failed == [f"reward.probe_{name}_high"]


def test_a_threshold_is_met_exactly_at_it():
    assert verdict("reward.accuracy_low", {**GOOD, "reward/accuracy_low": 0.7}).passed
    assert verdict("reward.invariance", {**GOOD, "reward/invariance": 1e-4}).passed


@pytest.mark.parametrize("gate", ["ppo.reward_gain_low", "reward.length_gain_low", "reward.majority_gain_low"])
def test_a_gain_of_exactly_nothing_is_no_gain(gate):
    """A policy that did not move draws SFT's own responses: every difference is 0, and so is the interval's width."""
    stage, _, short = gate.partition(".")
    thresholds = {**all_off()[stage], short: 0}
    for value, passes in ((0.0, False), (1e-9, True)):
        found = {each.name: each for each in judge(stage, {f"{stage}/{short}": value}, thresholds)}[gate]
        assert found.passed is passes
        assert found.text.endswith("must be > 0")


def test_a_waiver_lets_a_failed_gate_pass_with_name_and_reason_and_touches_no_other():
    waivers = [Waiver(gate="reward.ece", user="ada", reason="small test split")]
    verdicts = judge("reward", {**GOOD, "reward/ece": 0.5, "reward/accuracy_low": 0.1}, REWARD, waivers)
    by_name = {each.name: each for each in verdicts}
    assert by_name["reward.ece"].waived
    assert (by_name["reward.ece"].user, by_name["reward.ece"].reason) == ("ada", "small test split")
    assert not by_name["reward.ece"].passed
    assert by_name["reward.accuracy_low"].stops
    assert "reward.ece" not in str(failure("reward", verdicts))


def test_a_waiver_of_a_gate_that_passed_is_not_recorded_as_used():
    found = verdict("reward.ece", GOOD, waivers=[Waiver(gate="reward.ece", user="ada", reason="why not")])
    assert found.passed
    assert not found.waived


def test_a_gate_that_only_warns_never_stops():
    thresholds = {**all_off()["ppo"], "kl_floor": 1.0}
    found = {each.name: each for each in judge("ppo", {"ppo/kl": 0.01}, thresholds)}["ppo.kl_floor"]
    assert not found.passed
    assert not found.stops


def test_a_gate_without_any_threshold_is_refused_rather_than_left_off():
    with pytest.raises(TetherError, match=r"reward\.ece"):
        judge("reward", GOOD, {name: value for name, value in REWARD.items() if name != "ece"})


def test_a_gate_that_is_off_passes_whatever_the_metric():
    assert verdict("reward.ece", {}, {**REWARD, "ece": None}).passed


def test_thresholds_are_checked_against_the_registry():
    assert GatesConfig.model_validate(all_off()).stage("ppo")["kl"] is None
    given = GatesConfig.model_validate({**all_off(), "reward": {**REWARD, "calibration_slope": [0.8, 1.25]}})
    assert given.stage("reward") == REWARD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": {**REWARD, "accuracy_lo": 0.7}}, r"gates\.reward\.accuracy_lo .*reward\.accuracy_low"),
        ({"reward": {**REWARD, "ece": (0.0, 0.1)}}, "one number"),
        ({"reward": {**REWARD, "calibration_slope": 1.0}}, "low, high"),
        ({"reward": {**REWARD, "calibration_slope": (1.2, 0.8)}}, "low is above high"),
        ({"reward": {**REWARD, "ece": math.nan}}, "finite"),
        ({"reward": {**REWARD, "ece": True}}, "valid"),
        ({"reward": {"ece": 0.05}}, "has no threshold"),
    ],
)
def test_an_impossible_threshold_is_refused_by_name(change, message):
    with pytest.raises(ValidationError, match=message):
        GatesConfig.model_validate({**all_off(), **change})


def test_a_waiver_of_an_unknown_gate_names_the_nearest():
    with pytest.raises(UserError, match=r"ppo\.kl"):
        check_waivers([Waiver(gate="ppo.k", user="ada", reason="x")])


def test_a_kl_of_too_few_held_out_prompts_stops_the_run():
    thresholds = {**all_off()["ppo"], "evaluated": 256}
    for prompts, passes in ((255, False), (256, True)):
        found = {each.name: each for each in judge("ppo", {"ppo/evaluated": prompts}, thresholds)}["ppo.evaluated"]
        assert found.passed is passes
