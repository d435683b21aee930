"""What was measured of a model, as far as its card says it: metrics, their intervals, on how many."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from components.artifacts import Record
from flows.model_facts import ModelFacts
from flows.report import number

MEASURED = {
    "sft": {
        "sft/loss": "held-out loss, nats a token",
        "sft/perplexity": "held-out perplexity",
        "sft/ended": "share of responses that end",
        "sft/gold": "simulated gold score",
        "sft/violations": "simulated policy violations a response",
    },
    "reward": {
        "reward/accuracy": "held-out accuracy",
        "reward/ece": "expected calibration error, after temperature",
        "reward/calibration_slope": "recalibration slope",
        "reward/brier": "Brier score",
        "reward/length_accuracy": "accuracy of length alone",
    },
    "ppo": {
        "ppo/kl": "KL to the SFT model, nats a response",
        "ppo/kl_per_token": "the same, nats a token",
        "ppo/reward_gain": "reward over the SFT model's, in its standard deviations",
        "ppo/entropy": "entropy, nats a token",
        "ppo/response_tokens": "tokens a response",
        "ppo/ended": "share of responses that end",
        "ppo/gold": "simulated gold score",
        "ppo/violations": "simulated policy violations a response",
    },
    "human_eval": {
        "human_eval/win_rate": "win rate against the SFT model, ties a half",
        "human_eval/fleiss_kappa": "agreement of the raters (Fleiss' kappa)",
    },
}
"""What a card says of each stage, and what that is; the rest is in the run's report."""


class Measured(NamedTuple):
    """One metric of the card."""

    stage: str
    metric: str
    what: str
    value: float
    interval: tuple[float | None, float | None] | None
    """Ends of the 95 % interval, clustered by prompt; None for an end that isn't recorded."""
    n: str
    """What it was measured on."""


def measured(facts: ModelFacts) -> list[Measured]:
    """What was measured of a model and of what it was made of, as far as it is finite."""
    records = facts.stages_of
    found = []
    for stage, named in MEASURED.items():
        metrics = _metrics(facts, stage, records.get(stage))
        for metric, what in named.items():
            if (value := metrics.get(metric)) is not None and math.isfinite(value):
                ends = metrics.get(f"{metric}_low"), metrics.get(f"{metric}_high")
                interval = None if ends == (None, None) else ends
                found.append(Measured(stage, metric, what, value, interval, _count(stage, metrics, records)))
    return found


def _metrics(facts: ModelFacts, stage: str, record: Record | None) -> Mapping[str, Any]:
    """A stage's metrics; human_eval's, which judges the policy, are those of the run it is judged by."""
    if stage != "human_eval":
        return record.metrics if record is not None else {}
    return facts.stages.get(stage, {}).get("metrics", {}) if facts.kind == "policy" else {}


def _count(stage: str, metrics: Mapping[str, Any], records: Mapping[str, Record]) -> str:
    data = records["validate"].metrics if "validate" in records else {}
    match stage:
        case "sft":
            return f"up to {records['sft'].job['sft']['evaluate']} held-out demonstrations or prompts"
        case "reward":
            return f"{metrics.get('reward/test_pairs', math.nan):.0f} pairs"
        case "human_eval":
            return f"{metrics.get('human_eval/items', math.nan):.0f} items"
        case "ppo":
            asked = records["ppo"].job["ppo"]["evaluate"]
            return f"{min(asked, data.get('data/prompts_test', asked)):.0f} prompts"
    return ""


def arguments(each: Measured) -> dict[str, Any]:
    """The interval and what it was measured on, for a machine."""
    low, high = each.interval or (None, None)
    ends = {"low": low, "high": high} if each.interval else {}
    return {"measured_on": each.n, **{f"{name}_95": end for name, end in ends.items() if end is not None}}


def interval(each: Measured) -> str:
    """The 95 % interval in words; empty where none is recorded."""
    low, high = each.interval or (None, None)
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    return f"from {number(low)}" if low is not None else f"up to {number(high)}" if high is not None else ""
