"""A gate stops what it should stop, and says by how much."""

import math

import numpy as np
import pytest
from pydantic import ValidationError

from components.base.errors import UserError
from components.gates.gate_text import outcome, rule
from components.gates.judging import GatesConfig, Waiver, check_waivers, failure
from components.gates.judging import judge as judge_by
from components.gates.table import GATES
from components.stats.calibration.calibration_metrics import calibration
from components.stats.intervals import paired_gain

PROBES = ("filler", "flattery", "hedge", "repetition", "whitespace", "exclamations", "dots")
REWARD = {
    "accuracy_low": 0.7,
    "ece": 0.05,
    "calibration_slope": (0.8, 1.25),
    "invariance": 1e-4,
    "refresh_gain_low": -0.03,
    **{f"probe_{name}_high": 0.25 for name in PROBES},
}
GOOD = {
    "reward/accuracy_low": 0.72,
    "reward/ece": 0.06,
    "reward/ece_null_95": 0.07,
    "reward/calibration_slope": 1.0,
    "reward/invariance": 1e-5,
    "reward/refresh_gain_low": -0.03,
    **{f"reward/probe_{name}_high": 0.1 for name in PROBES},
}


def extra(name, **fields):
    return {"reward": {name: {"metric": "reward/mine", "op": "<=", **fields}}}


def all_off():
    off = {}
    for gate in GATES.values():
        off.setdefault(gate.group, {})[gate.short] = None
    return off


def judge(group, metrics, thresholds, waivers=()):
    stage = "ppo" if group == "policy" else group
    return judge_by(stage, metrics, GatesConfig.model_validate({group: thresholds}), waivers)


def verdict(name, metrics, thresholds=REWARD, waivers=()):
    return {each.name: each for each in judge("reward", metrics, thresholds, waivers)}[name]


def test_good_metrics_pass_every_gate():
    verdicts = judge("reward", GOOD, REWARD)
    assert sum(each.threshold is not None for each in verdicts) == len(REWARD) == 12
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


@pytest.mark.parametrize(
    ("gate", "threshold", "value"), [("judge_gain_low", 0.0, 3.0), ("rule_violations_excess", 0.05, -1.0)]
)
def test_an_estimate_without_an_interval_does_not_switch_its_gate_off(gate, threshold, value):
    estimate = f"policy/{gate.removesuffix('_low')}"
    metrics = paired_gain([value, value], [0.0, 0.0], ["the only prompt"] * 2).metrics(estimate)
    assert metrics == {estimate: value}
    found = next(v for v in judge("policy", metrics, {gate: threshold}) if v.name == f"policy.{gate}")
    assert found.stops and f"{estimate} ({value:g}) has no interval" in found.text


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


@pytest.mark.parametrize(
    ("slope", "low", "high", "passes"),
    [(0.7, 0.65, 1.5, True), (0.6, 0.65, 1.5, False), (1.6, 0.65, 1.5, False), (0.85, 0.9, 1.1, True),
     (0.7, math.nan, 1.5, False), (0.7, None, 1.5, False)],
)  # fmt: skip
def test_a_slope_may_be_outside_its_band_only_within_its_null(slope, low, high, passes):
    ends = {"reward/slope_null_low": low, "reward/slope_null_high": high}
    given = {**GOOD, "reward/calibration_slope": slope, **{name: end for name, end in ends.items() if end is not None}}
    found = verdict("reward.calibration_slope", given)
    assert found.passed is passes
    if low == 0.65:
        assert (
            "must be between [0.8, 1.25] or within reward/slope_null_low to reward/slope_null_high [0.65, 1.5]"
            in found.text
        )


@pytest.mark.parametrize(
    ("name", "metrics", "judged", "passes"),
    [
        ("reward.ece", {"reward/ece": 0.14, "reward/ece_null_95": 0.15}, True, True),
        ("reward.ece", {"reward/ece": 0.14, "reward/ece_null_95": 0.16}, False, True),
        ("reward.ece", {"reward/ece": 0.17, "reward/ece_null_95": 0.16}, True, False),
        ("reward.ece", {"reward/ece": 0.04, "reward/ece_null_95": 0.16}, True, True),
        ("reward.ece_width", {"reward/ece_width": 0.2, "reward/ece_width_null_95": 0.3}, False, True),
        ("reward.judge_ece", {"reward/judge_ece": 0.2, "reward/judge_ece_null_95": 0.3}, False, True),
        ("human_eval.reward_ece", {"human_eval/reward_ece": 0.2, "human_eval/reward_ece_null_95": 0.3}, False, True),
        ("reward.calibration_slope", {"reward/calibration_slope": 0.55, "reward/slope_null_low": 0.5,
                                      "reward/slope_null_high": 2}, True, True),
        ("reward.calibration_slope", {"reward/calibration_slope": 0.55, "reward/slope_null_low": 0.49,
                                      "reward/slope_null_high": 2}, False, True),
        ("reward.calibration_slope", {"reward/calibration_slope": 0.4, "reward/slope_null_low": 0.49,
                                      "reward/slope_null_high": 2}, True, False),
        ("reward.judge_calibration_slope", {"reward/judge_calibration_slope": 2.05, "reward/judge_slope_null_low": 0.5,
                                            "reward/judge_slope_null_high": 2.1}, False, True),
    ],
)  # fmt: skip
def test_a_null_that_anything_is_within_lets_no_gate_pass(
    name: str, metrics: dict[str, float], judged: bool, passes: bool
) -> None:
    stage = name.partition(".")[0]
    short = name.partition(".")[2]
    gates = GatesConfig.model_validate({stage: {short: [0.8, 1.25] if "slope" in short else 0.05}})
    (found,) = (each for each in judge_by(stage, metrics, gates) if each.name == name)
    assert (found.threshold is not None, found.passed) == (judged, passes)
    assert ("not judged" in found.text) == (not judged)
    if not judged:
        assert outcome(found) == "OFF" and rule(found) == "too few pairs to judge" and found.within is not None


@pytest.mark.parametrize(("pairs", "judged"), [(100, True), (20, False)])
def test_a_gate_that_is_judged_within_its_null_rejects_a_model_that_is_far_too_sure(pairs: int, judged: bool) -> None:
    rng, gates = np.random.default_rng(pairs), GatesConfig.model_validate({"reward": {"ece": 0.05}})
    passed, off = 0, 0
    for run in range(40):
        margins = np.abs(rng.normal(size=pairs) * 2)
        right = rng.random(pairs) < np.maximum(1 / (1 + np.exp(-margins)) - 0.2, 0)
        found = calibration(np.where(right, margins, -margins), range(pairs), 1.0, run, draws=200).numbers
        metrics = {f"reward/{name}": float(found[name] or 0) for name in ("ece", "ece_null_95")}
        (verdict,) = (each for each in judge_by("reward", metrics, gates) if each.name == "reward.ece")
        passed += verdict.passed and verdict.threshold is not None
        off += verdict.threshold is None
    assert passed <= 8, f"{passed} of 40 pass"
    assert judged == (off < 8), f"{off} of 40 are not judged"


def test_a_verdict_keeps_the_bound_of_its_null_and_one_without_a_null_has_none():
    assert verdict("reward.ece", {**GOOD, "reward/ece": 0.06, "reward/ece_null_95": 0.0731}).within == 0.0731
    ends = {"reward/slope_null_low": 0.65, "reward/slope_null_high": 1.5}
    assert verdict("reward.calibration_slope", {**GOOD, **ends}).within == (0.65, 1.5)
    assert verdict("reward.accuracy_low", GOOD).within is None


@pytest.mark.parametrize("name", PROBES)
def test_a_probe_without_evidence_fails_its_gate_and_one_above_its_threshold_fails_no_other(name):
    nothing = {metric: value for metric, value in GOOD.items() if metric != f"reward/probe_{name}_high"}
    for metrics in (nothing, {**GOOD, f"reward/probe_{name}_high": 0.26}):
        failed = [each.name for each in judge("reward", metrics, REWARD) if each.stops]
        assert failed == [f"reward.probe_{name}_high"]


def test_a_threshold_is_met_exactly_at_it():
    assert verdict("reward.accuracy_low", {**GOOD, "reward/accuracy_low": 0.7}).passed
    assert verdict("reward.invariance", {**GOOD, "reward/invariance": 1e-4}).passed


@pytest.mark.parametrize("gate", ["policy.reward_gain_low", "reward.length_gain_low", "reward.majority_gain_low"])
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
    thresholds = {**all_off()["policy"], "kl_floor": 1.0}
    found = {each.name: each for each in judge("policy", {"policy/kl_low": 0.01}, thresholds)}["policy.kl_floor"]
    assert not found.passed
    assert not found.stops


@pytest.mark.parametrize(
    ("low", "high", "passes"),
    [(0.5, 2.0, True), (0.49, 1.2, False), (0.8, 2.01, False), (None, 1.2, False), (0.8, math.nan, False)],
)
def test_a_ratio_between_two_bounds_is_judged_by_both_ends_of_its_interval(low, high, passes):
    metrics = {"policy/length_ratio": 1.0, "policy/length_ratio_low": low, "policy/length_ratio_high": high}
    known = {name: value for name, value in metrics.items() if value is not None}
    verdicts = judge("policy", known, {**all_off()["policy"], "length_ratio": [0.5, 2.0]})
    found = next(each for each in verdicts if each.name == "policy.length_ratio")
    assert (found.passed, found.value) == (passes, 1.0)
    if low and math.isfinite(high):
        assert f"is 1 with an interval from {low} to {high:g}, must be between [0.5, 2]" in found.text


def test_a_gate_that_nothing_names_is_off_and_known_as_such():
    named = {name: value for name, value in {**all_off()["reward"], **REWARD}.items() if name != "ece"}
    found = {each.name: each for each in judge("reward", {**GOOD, "reward/ece": 9.0}, named)}["reward.ece"]
    assert found.threshold is None and found.passed and outcome(found) == "OFF"
    assert GatesConfig.model_validate({**all_off(), "reward": named}).unnamed == ["reward.ece"]
    assert GatesConfig.model_validate(all_off()).unnamed == []
    assert GatesConfig().unnamed == list(GATES)


def test_a_gate_that_is_off_passes_whatever_the_metric():
    assert verdict("reward.ece", {}, {**REWARD, "ece": None}).passed


def test_thresholds_are_checked_against_the_registry():
    assert all(threshold is None for _, threshold in GatesConfig.model_validate(all_off()).rules("ppo"))
    given = GatesConfig.model_validate({"reward": {**REWARD, "calibration_slope": [0.8, 1.25]}})
    assert {gate.short: threshold for gate, threshold in given.rules("reward") if threshold is not None} == REWARD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": {**REWARD, "accuracy_lo": 0.7}}, r"gates\.reward\.accuracy_lo .*reward\.accuracy_low"),
        ({"reward": {**REWARD, "ece": (0.0, 0.1)}}, "one number"),
        ({"reward": {**REWARD, "calibration_slope": 1.0}}, "low, high"),
        ({"reward": {**REWARD, "calibration_slope": (1.2, 0.8)}}, "low is above high"),
        ({"reward": {**REWARD, "ece": math.nan}}, "finite"),
        ({"reward": {**REWARD, "ece": True}}, "valid"),
        ({"extra": extra("ece", threshold=1)}, "built-in gate's name"),
        ({"pp": {}}, r"gates\.pp is not a group of gates; did you mean ppo"),
        ({"extra": extra("my gate", threshold=1)}, "not a valid gate name"),
        ({"extra": extra("mine", threshold=(0, 1))}, r"gates\.extra\.reward\.mine\.threshold is .* one number"),
        ({"extra": extra("mine", op="between", threshold=(2, 1))}, "low is above high"),
        ({"extra": extra("mine", threshold=math.inf)}, "finite"),
        ({"extra": extra("mine", op="=>", threshold=1)}, "'<=', '>='"),
        ({"extra": extra("mine")}, "threshold"),
    ],
)
def test_an_impossible_threshold_is_refused_by_name(change, message):
    with pytest.raises(ValidationError, match=message):
        GatesConfig.model_validate({**all_off(), **change})


def test_a_waiver_of_an_unknown_gate_names_the_nearest():
    with pytest.raises(UserError, match=r"policy\.kl"):
        check_waivers([Waiver(gate="ppo.k", user="ada", reason="x")], GatesConfig())


def test_an_extra_gate_is_judged_waived_and_counted_as_any_other():
    entropy = {"metric": "policy/entropy", "op": ">=", "threshold": 0.2, "description": "the policy still explores"}
    gates = GatesConfig.model_validate({"policy": {"kl": 8}, "extra": {"ppo": {"entropy_floor": entropy}}})
    metrics = {"policy/kl_high": 1.0, "policy/entropy": 0.1}
    (found,) = [each for each in judge_by("ppo", metrics, gates) if each.stops]
    assert (found.name, found.metric, found.text) == (
        "ppo.entropy_floor", "policy/entropy", "policy/entropy is 0.1, must be >= 0.2"
    )  # fmt: skip
    assert "the policy still explores" in str(failure("ppo", [found]))
    assert all(each.name != "ppo.entropy_floor" for each in judge_by("sft", metrics, gates))
    assert not failure("ppo", judge_by("ppo", {**metrics, "policy/entropy": 0.2}, gates))

    waiver = Waiver(gate="ppo.entropy_floor", user="ada", reason="a short run")
    check_waivers([waiver], gates)
    assert outcome(judge_by("ppo", metrics, gates, [waiver])[-1]) == "WAIVED"
    with pytest.raises(UserError, match=r"did you mean ppo\.entropy_floor"):
        check_waivers([waiver.model_copy(update={"gate": "ppo.entropy_flor"})], gates)


def test_an_extra_gate_may_only_warn_and_may_be_off_or_dropped():
    entropy = {"metric": "policy/entropy", "op": "between", "threshold": [1, 2], "warn_only": True}
    for change, words in (({}, "WARN"), ({"threshold": None}, "OFF")):
        gates = GatesConfig.model_validate({"extra": {"ppo": {"entropy": {**entropy, **change}}}})
        (found,) = [each for each in judge_by("ppo", {"policy/entropy": 3.0}, gates) if each.metric == "policy/entropy"]
        assert outcome(found) == words and not found.stops
    assert not any(
        each.metric == "policy/entropy"
        for each in judge_by("ppo", {}, GatesConfig.model_validate({"extra": {"ppo": {"entropy": None}}}))
    )


def test_a_metric_that_is_not_recorded_fails_and_names_what_is():
    gates = GatesConfig.model_validate(
        {"extra": {"ppo": {"floor": {"metric": "policy/entropi", "op": ">=", "threshold": 0}}}}
    )
    (found,) = [each for each in judge_by("ppo", {"policy/entropy": 0.3, "sft/loss": 1.0}, gates) if each.stops]
    assert found.text == "policy/entropi is missing, must be >= 0; ppo recorded policy/entropy"


def test_gates_are_dumped_as_they_are_read():
    given = {
        "extra": {
            "ppo": {
                "e": {"metric": "policy/e", "op": "<=", "threshold": 1.0, "description": "", "warn_only": False,
                      "plugin": "", "timeout": 600.0, "code": "auto"},
                "f": None,
            }
        },
        "policy": {"kl": 8.0, "length_ratio": [0.5, 2.0]},
    }  # fmt: skip
    gates = GatesConfig.model_validate(given)
    assert gates.model_dump(mode="json") == given
    assert GatesConfig.model_validate(gates.model_dump(mode="json")) == gates
