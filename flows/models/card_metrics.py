"""What was measured of a model, as far as its card says it: metrics, their intervals, on how many."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from components.base.nested import group
from components.gates.table import MAIN_METRICS
from components.gates.text import number
from components.store.store import Record
from flows.models.facts import OF_JUDGE, ModelFacts


class CardMetric(NamedTuple):
    """One metric of the card."""

    stage: str
    metric: str
    what: str
    value: float
    interval: tuple[float | None, float | None]
    """Ends of the 95 % interval, clustered by prompt; None for an end that isn't recorded."""
    n: str
    """What it was measured on."""


def measured(facts: ModelFacts) -> list[CardMetric]:
    """Return what was measured of a model and of what it was made of, as far as it is finite."""
    records = facts.stages_of
    found = []
    for stage, shown in MAIN_METRICS.items():
        metrics = _metrics(facts, stage, records.get(stage))
        for metric, what in ((each.name, each.text) for each in shown if each.card):
            if (value := metrics.get(metric)) is not None and math.isfinite(value):
                ends = metrics.get(f"{metric}_low"), metrics.get(f"{metric}_high")
                n = _count(metric, stage, metrics, records)
                found.append(CardMetric(stage, metric, what, value, ends, n))
    return found


def _metrics(facts: ModelFacts, stage: str, record: Record | None) -> Mapping[str, float | None]:
    """Return a stage's metrics; human_eval's, which judges the policy, are those of the run it is judged by."""
    if stage != "human_eval":
        judge = facts.stages_of.get(OF_JUDGE) if stage == "reward" else None
        return ({} if judge is None else judge.metrics) | ({} if record is None else record.metrics)
    return facts.stages[stage].metrics if stage in facts.stages and facts.kind == "policy" else {}


def _count(metric: str, stage: str, metrics: Mapping[str, float | None], records: Mapping[str, Record]) -> str:
    data = records["validate"].metrics if "validate" in records else {}
    match stage:
        case "sft":
            return f"up to {group(records['sft'].job, 'sft')['evaluate']} held-out demonstrations or prompts"
        case "reward":
            pairs = "reward/judge_test_pairs" if metric.startswith("reward/judge_") else "reward/test_pairs"
            return f"{metrics.get(pairs, math.nan):.0f} pairs"
        case "human_eval":
            return f"{metrics.get('human_eval/items', math.nan):.0f} items"
        case "ppo":
            numbers = (group(records["ppo"].job, "ppo")["evaluate"], data.get("data/prompts_test"))
            return f"{min(n for n in numbers if isinstance(n, int | float)):.0f} prompts"
    return ""


def arguments(each: CardMetric) -> dict[str, str | float]:
    """Return the interval and what it was measured on, for a machine."""
    ends = zip(("low_95", "high_95"), each.interval, strict=True)
    return {"measured_on": each.n, **{name: end for name, end in ends if end is not None}}


def interval(each: CardMetric) -> str:
    """Return the 95 % interval in words; empty where none is recorded."""
    low, high = each.interval
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    return f"from {number(low)}" if low is not None else f"up to {number(high)}" if high is not None else ""
