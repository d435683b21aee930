"""Former names of options, gates and metrics are read under the present ones."""

from typing import Any

import pytest

from components.gates.built_in.policy_gates import POLICY_GATES
from components.gates.judging import Verdict, Waiver
from components.gates.renamed import METRICS_OF_TRAINING, present_metrics, present_options
from components.gates.table import MAIN_METRICS
from components.store.records import Record


def test_metrics_of_a_policy_lose_the_name_of_ppo() -> None:
    former = {"ppo/kl": 1.0, "ppo/judge_kind_gain_low": 2.0, "ppo/sft_rule_promise": 3.0, "ppo/last_kl": 4.0}
    record = Record(stage="ppo", key="k", digest="d", files={}, metrics={**former, "ppo/beta": 0.1, "ppo/beta_x": 5.0})
    assert record.metrics == {"policy/kl": 1.0, "policy/judge_kind_gain_low": 2.0, "policy/sft_rule_promise": 3.0,
                              "policy/last_kl": 4.0, "ppo/beta": 0.1, "policy/beta_x": 5.0}  # fmt: skip
    assert not {gate.metric for gate in POLICY_GATES} & {f"policy/{name}" for name in METRICS_OF_TRAINING}
    assert {metric.name.partition("/")[0] for metric in MAIN_METRICS["ppo"]} == {"policy"}


def test_metrics_of_a_new_record_keep_their_names() -> None:
    assert present_metrics(new := {"policy/kl": 1.0, "ppo/a_later_metric": 2.0}) == new


def test_a_former_verdict_and_waiver_name_the_present_gate() -> None:
    text = "ppo/kl_high is 9, must be <= 8; ppo recorded ppo/kl, ppo/beta, ppo/plugin/kl"
    verdict = Verdict(name="ppo.kl", metric="ppo/kl_high", value=9.0, op="<=", threshold=8.0, passed=False, text=text)
    assert (verdict.name, verdict.metric) == ("policy.kl", "policy/kl_high")
    assert verdict.text == "policy/kl_high is 9, must be <= 8; ppo recorded policy/kl, ppo/beta, ppo/plugin/kl"
    assert [Waiver(gate=name, user="ada", reason="x").gate for name in ("ppo.echo", "ppo.stopped", "ppo.mine")] == [
        "policy.echo", "ppo.stopped", "ppo.mine",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "present"),
    [
        ({"gates": {"ppo": {"kl": 8, "stopped": 0}}}, {"gates": {"policy": {"kl": 8}, "ppo": {"stopped": 0}}}),
        ({"gates": {"ppo": {"kl": 8}, "policy": {"kl": 7}}}, {"gates": {"ppo": {"kl": 8}, "policy": {"kl": 7}}}),
        ({"gates": {"ppo": {"kl": 8}, "policy": 7}}, {"gates": {"ppo": {}, "policy": 7}}),
        ({"gates": None, "ppo": {"kl": {"target": 3}}}, {"gates": None, "ppo": {"kl": {"target": 3}}}),
    ],
)
def test_former_options_are_moved_to_their_present_names(values: Any, present: Any) -> None:
    before = repr(values)
    assert present_options(values) == present and repr(values) == before
