"""Judges of `ppo.rewards`: the gated gain is the strictest judge's, and no rewarding source has a part in it."""

from types import SimpleNamespace
from typing import Any

import pytest

from components.gates.judging import GatesConfig, Verdict, judge
from components.ppo.evaluate import _by_source
from components.rewards.config import ModelReward, PipelineReward
from components.rewards.weighted import Rewards
from components.stats.intervals import clustered_mean

PROMPTS = ["a", "a", "b", "c", "d", "e"]
GAINS = {
    "pipeline": [2.0] * 6, "kind": [0.9, 0.7, 0.8, 1.0, 0.6, 0.8], "strict": [0.5, -0.4, 1.3, -0.2, 0.1, -0.6],
}  # fmt: skip


def measured(*judges: str) -> dict[str, float]:
    configs: list[Any] = [
        PipelineReward(source="pipeline"),
        *(ModelReward(source="model:x", name=each, judge=True) for each in judges),
    ]
    names = [config.name for config in configs]
    sft: list[Any] = [SimpleNamespace(rewards=dict.fromkeys(names, float(i))) for i in range(6)]
    policy: list[Any] = [SimpleNamespace(rewards={name: i + GAINS[name][i] for name in names}) for i in range(6)]
    models: Any = SimpleNamespace(rewards=Rewards(configs, {}), judge=None)
    return _by_source(models, policy, sft, PROMPTS)


def verdict(metrics: dict[str, float]) -> Verdict:
    return next(
        each for each in judge("ppo", metrics, GatesConfig(policy={"judge_gain_low": 0}))
        if each.name == "policy.judge_gain_low"
    )  # fmt: skip


def test_the_judge_with_the_lowest_lower_end_is_the_gated_one() -> None:
    metrics, strict = measured("kind", "strict"), clustered_mean(GAINS["strict"], PROMPTS)
    for end, expected in (("", strict.value), ("_low", strict.low), ("_high", strict.high)):
        assert metrics[f"policy/judge_gain{end}"] == pytest.approx(expected)
        assert metrics[f"policy/judge_strict_gain{end}"] == metrics[f"policy/judge_gain{end}"]
    assert metrics["policy/reward_pipeline_gain"] == 2.0 and strict.low < 0 < metrics["policy/judge_kind_gain_low"]
    assert verdict(metrics).stops and not verdict(measured("kind")).stops


def test_without_a_judge_nothing_is_measured_and_the_gate_is_off() -> None:
    metrics = measured()
    assert not [name for name in metrics if "judge" in name]
    assert verdict(metrics).threshold is None and not verdict(metrics).stops
