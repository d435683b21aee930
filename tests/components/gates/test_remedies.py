"""What a failed gate advises: every gate has a remedy, and what it sets is a config that loads."""

import pytest

from components.base.nested import flatten
from components.gates.judging import Verdict
from components.gates.margins import margin, tightness
from components.gates.methods import is_used
from components.gates.remedies import rerun_from
from components.gates.table import GATES
from flows.config.profiles import parse_override
from flows.config.run_config import load_config, to_values
from tasks.stages import PIPELINE


def verdict(name: str, value: float | None, threshold: object, **fields: object) -> Verdict:
    gate = GATES[name]
    given = {"name": name, "metric": gate.metric, "op": gate.op, "value": value, "threshold": threshold}
    return Verdict.model_validate(given | {"passed": False} | fields)


@pytest.mark.parametrize("profile", ["tiny", "demo"])
def test_what_a_remedy_sets_loads_as_a_config(profile: str) -> None:
    values = flatten(to_values(load_config(profile)))
    used = {name: value for name, value in values.items() if is_used("ppo", name)}  # as `verdict` gives them
    settings = [gate.setting(0.5, (0.6, 0.7) if gate.op == "between" else 0.4, used) for gate in GATES.values()]
    assignments = {setting.assignment for setting in settings if setting is not None}
    assert len(assignments) > 12
    for assignment in assignments:
        changed = flatten(to_values(load_config(profile, [parse_override(assignment)])))
        assert {name for name in changed if changed[name] != values.get(name)} == {assignment.partition("=")[0]}


@pytest.mark.parametrize(
    ("control", "coefficient", "assignment"),
    [
        ("adaptive", 0.1, "ppo.kl.target=1.4"),  # 0.9 x 3 x 6.5 / 13 = 1.35
        ("fixed", 0.1, "ppo.kl.coefficient=0.2"),
        ("fixed", 0.0, "ppo.kl.coefficient=0.1"),
    ],
)
def test_kl_above_its_bound_sets_what_holds_it(control: str, coefficient: float, assignment: str) -> None:
    values = {"ppo.kl.control": control, "ppo.kl.target": 3.0, "ppo.kl.coefficient": coefficient}
    setting = GATES["policy.kl"].setting(13.0, 6.5, values)
    assert setting is not None and setting.assignment == assignment


def test_a_remedy_for_a_direct_method_is_one_of_its_options() -> None:
    values = flatten(to_values(load_config("demo", [parse_override("policy.method=dpo")])))
    used = {name: value for name, value in values.items() if is_used("dpo", name)}
    settings = [gate.setting(0.5, (0.6, 0.7) if gate.op == "between" else 0.4, used) for gate in GATES.values()]
    options = {setting.option for setting in settings if setting is not None and setting.option[:3] in ("ppo", "pol")}
    assert options == {"policy.beta", "policy.epochs"}


def test_a_gate_that_no_option_helps_changes_nothing() -> None:
    assert GATES["validate.contract"].setting(0.0, 1.0, {}) is None
    assert GATES["sft.loss"].setting(2.0, 1.0, {}) is None


def test_a_rerun_begins_at_the_first_stage_that_an_option_changes() -> None:
    assert rerun_from(["ppo.kl.target", "reward.epochs"], PIPELINE) == "reward"
    assert rerun_from(["generation.max_new_tokens", "ppo.updates"], PIPELINE) == "validate"
    assert rerun_from(["judge.epochs"], PIPELINE) == "reward"


@pytest.mark.parametrize(
    ("found", "slack", "text"),
    [
        (verdict("policy.kl", 9.3, 6.5), (6.5 - 9.3) / 9.3, "43 % above the bound"),
        (verdict("policy.kl", 160.0, 6.5), (6.5 - 160) / 160, "153.5 above the bound"),
        (verdict("policy.reward_gain_low", 0.3, 0.0, passed=True), 1.0, "0.3 above the bound"),
        (verdict("reward.accuracy_low", 0.68, 0.7), -0.02 / 0.7, "3 % below the bound"),
        (verdict("reward.ece", 0.06, 0.05, within=0.08, passed=True), 0.25, "25 % below the bound"),
        (verdict("validate.contract", 1.0, 1.0, passed=True), 0.0, "at the bound"),
        (verdict("policy.kl", None, 6.5), None, "not measured"),
        (verdict("policy.length_ratio", 1.1, (0.5, 2.0)), -0.2, "outside the range by 20 % of its width"),
    ],
)
def test_a_margin_is_the_room_left_and_reads_as_that(found: Verdict, slack: float | None, text: str) -> None:
    ends = {"policy/length_ratio_low": 0.9, "policy/length_ratio_high": 2.3}
    made = margin(found, ends)
    assert made.text == text and made.slack == (None if slack is None else pytest.approx(slack))


def test_failed_gates_come_first_then_the_tightest_and_what_must_be_met_exactly_last() -> None:
    gates = [
        verdict("validate.contract", 1.0, 1.0, passed=True),
        verdict("sft.loss", 1.0, 2.0, passed=True),
        verdict("policy.kl", 6.0, 6.5, passed=True),
        verdict("policy.ended", 0.9, 0.95, waived=True, user="ada", reason="r"),
        verdict("policy.echo", 0.4, 0.1),
        verdict("policy.repetition", None, 0.1),
    ]
    order = sorted(gates, key=lambda each: tightness(each, margin(each, {})))
    assert [each.name.partition(".")[2] for each in order] == ["repetition", "echo", "ended", "kl", "loss", "contract"]
