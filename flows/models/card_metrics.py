"""The metrics on a model's card: values, intervals and sample sizes."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from components.base.nested import group
from components.gates.gate_text import number
from components.gates.table import MAIN_METRICS
from components.store.store import Record
from flows.models.model_facts import OF_JUDGE, ModelFacts


class CardMetric(NamedTuple):
    """One metric on the card."""

    stage: str
    metric: str
    what: str
    value: float
    interval: tuple[float | None, float | None]
    """Ends of the 95 % interval, clustered by prompt; None for an end that is not recorded."""
    n: str
    """The data it was measured on, for example `844 pairs`."""


def measured(facts: ModelFacts) -> list[CardMetric]:
    """Return the finite metrics of a model and of the stages it was made by."""
    records = facts.stages_of
    rows = []
    for stage, main in MAIN_METRICS.items():
        metrics = _metrics(facts, stage, records.get(stage))
        for metric, what in ((fact.name, fact.text) for fact in main if fact.card):
            if (value := metrics.get(metric)) is not None and math.isfinite(value):
                ends = metrics.get(f"{metric}_low"), metrics.get(f"{metric}_high")
                n = _count(metric, stage, metrics, records)
                rows.append(CardMetric(stage, metric, what, value, ends, n))
    return rows


def _metrics(facts: ModelFacts, stage: str, record: Record | None) -> Mapping[str, float | None]:
    """Return a stage's metrics. Those of human_eval apply to the policy only, and come from the run that judges it."""
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


def arguments(metric: CardMetric) -> dict[str, str | float]:
    """Return the interval and the sample as values for a machine."""
    ends = zip(("low_95", "high_95"), metric.interval, strict=True)
    return {"measured_on": metric.n, **{name: end for name, end in ends if end is not None}}


def interval(metric: CardMetric) -> str:
    """Return the 95 % interval as text; empty if none is recorded."""
    low, high = metric.interval
    if low is not None and high is not None:
        return f"{number(low)} to {number(high)}"
    return f"from {number(low)}" if low is not None else f"up to {number(high)}" if high is not None else ""
