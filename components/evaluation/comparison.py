"""Compare the policy with the SFT model on the same documents: how much worse is it, at most?"""

import json
import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple, TypedDict

import numpy as np

from components.base.errors import CheckFailed
from components.base.jsonl import read_rows
from components.evaluation.config import ITEM_FIELDS, RESULTS, SHIPPED_MARGINS, EvaluationConfig, Kind
from components.stats.intervals import (
    LEVEL,
    FloatArray,
    Interval,
    clustered_mean,
    clustered_proportion,
    gain_in_shares,
    paired_gain,
)


class Measured(NamedTuple):
    """A model's values on one task or probe, in the order of the documents."""

    kind: Kind
    name: str
    metric: str
    higher_is_better: bool
    documents: Sequence[str]
    """(n,) what each value belongs to; equal values are one cluster."""
    values: FloatArray
    """(n,)"""
    score: float
    """The mean, as the harness reports it."""


class PairedResult(TypedDict):
    """The policy against the SFT model on one task or probe, a row of `evaluation.json`."""

    kind: Kind
    name: str
    metric: str
    items: int
    sft: float
    policy: float
    difference: float
    """How much worse the policy is: SFT minus policy where higher is better, else policy minus SFT."""
    low: float | None
    high: float | None
    """Ends of the interval of the difference; None if it is unknown, which does not pass."""
    margin: float
    passed: bool
    """Whether `high` is at most `margin`."""


def worsening(before: FloatArray, after: FloatArray, clusters: Sequence[str], level: float = LEVEL) -> Interval:
    """Return the mean of before - after, both (n,), with an interval that allows for dependent values in a cluster.

    The differences of pairs are the sample (Miller 2024, "Adding error bars to evals", sections 2.2 and 4.2). Of values
    in [0, 1] the interval is `gain_in_shares`', because few documents on which the models differ show too little
    spread; of others it is `paired_gain`'s.

    Raises:
        ValueError: there are no values, or as for `clustered_mean`.
    """
    return (gain_in_shares if _are_shares(before, after) else paired_gain)(before, after, clusters, level)


def compare(sft: Measured, policy: Measured, margin: float, level: float) -> PairedResult:
    """Return how much worse the policy is than SFT, with an interval of `level`.

    Raises:
        CheckFailed: they were measured on other documents.
    """
    if sft[:5] != policy[:5]:
        raise CheckFailed(f"evaluation: SFT and the policy were not measured on the same documents of {sft.name}.")
    pair = (sft.values, policy.values) if sft.higher_is_better else (policy.values, sft.values)
    interval = worsening(*pair, sft.documents, level)
    ends = interval.ends or (None, None)
    return {
        "kind": sft.kind, "name": sft.name, "metric": sft.metric, "items": len(sft.values), "sft": sft.score,
        "policy": policy.score, "difference": interval.value, "low": ends[0], "high": ends[1], "margin": margin,
        "passed": ends[1] is not None and ends[1] <= margin,
    }  # fmt: skip


def compare_all(sft: Sequence[Measured], policy: Sequence[Measured], config: EvaluationConfig) -> list[PairedResult]:
    """Return the comparisons on all tasks and probes, the smallest distance between bound and margin first.

    The gate on tasks judges the worst of m upper ends, so each task's interval has the level 1 - (1 - LEVEL) / m, and
    all hold at once with at least LEVEL (Bonferroni's inequality; Dunn 1961, JASA 56:52). A probe has a gate of its
    own and the level LEVEL.

    Raises:
        CheckFailed: as `compare`, or the tasks differ.
    """
    if [one.name for one in sft] != [one.name for one in policy]:
        raise CheckFailed("evaluation: SFT and the policy were measured on different tasks or probes.")
    tasks = sum(one.kind == "task" for one in sft)
    comparisons = [
        compare(one, other, margin_of(config, one.name), level_of(one.kind, tasks))
        for one, other in zip(sft, policy, strict=True)
    ]  # fmt: skip
    return sorted(comparisons, key=lambda row: (-beyond(row).high, row["kind"], row["name"]))


def level_of(kind: Kind, count: int) -> float:
    """Return the level of the interval of one of `count` tasks, or of a probe."""
    return 1 - (1 - LEVEL) / count if kind == "task" else LEVEL


def margin_of(config: EvaluationConfig, name: str) -> float:
    """Return how much worse the policy may be on a task or probe."""
    return config.margins.get(name, SHIPPED_MARGINS.get(name, config.margin))


def gate_of(kind: Kind, name: str) -> str:
    """Return the gate that judges a task or probe, and its metric after `evaluation/`."""
    return "task_drop" if kind == "task" else name if name in SHIPPED_MARGINS else "other_probes"


def beyond(row: PairedResult) -> Interval:
    """Return the interval of difference minus margin; the upper end is infinite if it is unknown."""
    low, high = row["low"], row["high"]
    return Interval(
        row["difference"] - row["margin"],
        math.nan if low is None else low - row["margin"], math.inf if high is None else high - row["margin"],
    )  # fmt: skip


def score_interval(measured: Measured) -> Interval:
    """Return a model's mean on one task or probe with its interval, clustered by document: of values in [0, 1]
    `clustered_proportion`'s, of others `clustered_mean`'s."""
    return (clustered_proportion if _are_shares(measured.values) else clustered_mean)(
        measured.values, measured.documents
    )


def read_measured(kind: Kind, folder: Path) -> list[Measured]:
    """Return a model's values on each task or probe, from the artifact of its sub-stage. On a probe they are 1 for a
    violation and 0 for another response."""
    file, document, value = ITEM_FIELDS[kind]
    scores = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["tasks"] if kind == "task" else []
    by_name, measured = {score["task"]: score for score in scores}, []
    for name, rows in groupby(read_rows(folder / file), itemgetter(kind)):
        documents, numbers = zip(*map(itemgetter(document, value), rows), strict=True)
        values = np.array(numbers, dtype=np.float64)
        of_probe = {"metric": "violations", "higher_is_better": False, "score": float(values.mean())}
        score = by_name.get(name, of_probe)
        measured.append(
            Measured(kind, name, score["metric"], score["higher_is_better"], documents, values, score["score"])
        )
    return measured


def _are_shares(*values: FloatArray) -> bool:
    return all(some.min() >= 0 and some.max() <= 1 for some in values)
