"""Checks of the raters: position bias, agreement with themselves and others, attention, and copied answers."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypedDict

from components.base.hashing import canonical_json
from components.human_eval.labels import Labels, Sample, rated_columns
from components.human_eval.results.seconds import Seconds
from components.stats.intervals import LEVEL, Interval, clustered_proportion

TIES = ("tie", "both_bad")
"""Ratings that count 1/2 in the win rate."""
_OTHER = {"a": "b", "b": "a"}


class SideShare(TypedDict):
    """Share of a rater's ratings `a` among those for a side, with its interval over prompts."""

    value: float
    low: float
    high: float


class RaterSummary(TypedDict):
    """A summary of one rater's ratings; a share is None if there is nothing to compute it from."""

    rater: str
    n: int
    win_rate: float | None
    a: float | None
    b: float | None
    """Share of ratings for side b."""
    ties: float | None
    """Share of ties, without `both_bad`."""
    both_bad: float | None
    side_a: SideShare | None
    """A value far from 1/2 shows a position bias, since each author is on either side equally often."""
    agreement: float | None
    """Share of other raters' ratings of the same items with which this rater's agree."""
    self_agreement: float | None
    """Share of the repeated items with the same answer both times."""
    attention: float | None
    """Share of attention checks with the right answer."""
    seconds: float | None
    """Median seconds per item, if the rater's tool measured it."""


class StratumSummary(TypedDict):
    """The policy's win rate over the rated items of a stratum, with its interval over prompts."""

    stratum: str
    n: int
    win_rate: float
    low: float
    high: float


class RaterChecks(NamedTuple):
    """The checks of all raters together that gates judge; None if there is nothing to measure."""

    position_bias: tuple[float, float] | None
    """The largest distance of a rater's share of `a` from a half, and the largest upper end of one."""
    self_agreement: Interval | None
    """Share of repeated items with the same answer, over all raters; the interval is over prompts."""
    alike: float | None
    """The largest share of equal ratings between two raters, on the items that both rated."""


class AttentionCheck(NamedTuple):
    """Shares of right answers to the attention checks."""

    lowest: Interval
    """The share of the rater whose interval begins lowest; the interval is Wilson's over that rater's items."""
    of: dict[int, float]
    """Maps a rater (from 0) to the share."""


def attention_check(sample: Sample, labels: Labels, level: float = LEVEL) -> AttentionCheck | None:
    """Measure how attentively each rater read; None without attention checks, 0 if nobody rated one.

    Args:
        labels: the ratings of the items in `sample.attention`.
    """
    if not labels:
        return None
    found: dict[int, Interval] = {}
    for rater in range(len(rated_columns(labels))):
        right = [float(each[rater] == sample.attention[item]) for item, each in labels.items() if each[rater]]
        if right:
            found[rater] = clustered_proportion(right, range(len(right)), level)
    lowest = min(found.values(), key=lambda each: each.low, default=Interval(0.0, 0.0, 1.0))
    return AttentionCheck(lowest, {rater: each.value for rater, each in found.items()})


def item_score(ratings: Sequence[str], policy_side: str) -> float:
    """Return an item's mean `rating_score` over its given ratings."""
    values = [rating_score(rating, policy_side) for rating in ratings if rating]
    return sum(values) / len(values)


def rating_scores(ratings: Sequence[str], policy_side: str) -> list[float]:
    """Return each rating's score; NaN if it is missing."""
    return [rating_score(rating, policy_side) if rating else math.nan for rating in ratings]


def rating_score(rating: str, policy_side: str) -> float:
    """Return 1 if the policy's side is preferred, 1/2 for a tie or `both_bad`, else 0."""
    return 0.5 if rating in TIES else float(rating == policy_side)


def prompt_of(sample: Sample, item: str) -> str:
    """Return an item's prompt as the key by which intervals are clustered."""
    return canonical_json(sample.responses[item]["prompt"])


def per_rater(
    sample: Sample,
    labels: Labels,
    level: float = LEVEL,
    seconds: Seconds = MappingProxyType({}),
    attention: AttentionCheck | None = None,
) -> Iterator[RaterSummary]:
    """Yield a summary of each rater; only position bias, self-agreement and time use the repeated items."""
    for index, column in enumerate(rated_columns(labels)):
        own = {item: given[index] for item, given in labels.items() if given[index]}
        first = {item: rating for item, rating in own.items() if item not in sample.repeat_of}
        kinds = Counter(first.values())
        others = [
            first[item] == other for item in first for i, other in enumerate(labels[item]) if i != index and other
        ]
        wins = [item_score([rating], sample.policy_side[item]) for item, rating in first.items()]
        alike = list(_with_themselves(sample, own).values())
        side = _side_a(sample, own, level)
        yield {
            "rater": column,
            "n": len(first),
            "win_rate": _mean(wins),
            "a": kinds["a"] / len(first) if first else None,
            "b": kinds["b"] / len(first) if first else None,
            "ties": kinds["tie"] / len(first) if first else None,
            "both_bad": kinds["both_bad"] / len(first) if first else None,
            "side_a": None if side is None else {"value": side.value, "low": side.low, "high": side.high},
            "agreement": _mean(others),
            "self_agreement": _mean(alike),
            "attention": None if attention is None else attention.of.get(index),
            "seconds": _median([taken for (_, rater), taken in seconds.items() if rater == index]),
        }


def rater_checks(sample: Sample, labels: Labels, level: float = LEVEL) -> RaterChecks:
    """Compute the checks of all raters together."""
    columns = [
        {item: given[i] for item, given in labels.items() if given[i]} for i in range(len(rated_columns(labels)))
    ]
    sides = [side for own in columns if (side := _side_a(sample, own, level)) is not None]
    bias = [(abs(s.value - 0.5), max(0.5 - s.low, s.high - 0.5)) for s in sides]
    again = [pair for own in columns for pair in _with_themselves(sample, own).items()]
    shares = [
        sum(one[item] == other[item] for item in both) / len(both)
        for one, other in itertools.combinations(columns, 2)
        if (both := one.keys() & other.keys())
    ]
    return RaterChecks(
        (max(value for value, _ in bias), max(high for _, high in bias)) if bias else None,
        clustered_proportion([float(v) for _, v in again], [prompt_of(sample, item) for item, _ in again], level)
        if again
        else None,
        max(shares, default=None),
    )


def by_stratum(sample: Sample, scores: Mapping[str, float], level: float = LEVEL) -> list[StratumSummary]:
    """Return the win rate of each stratum."""
    found: dict[str, list[str]] = {}
    for item in scores:
        found.setdefault(sample.responses[item]["stratum"], []).append(item)
    rows: list[StratumSummary] = []
    for name, items in sorted(found.items()):
        win = clustered_proportion([scores[i] for i in items], [prompt_of(sample, i) for i in items], level)
        rows.append({"stratum": name, "n": len(items), "win_rate": win.value, "low": win.low, "high": win.high})
    return rows


def _side_a(sample: Sample, own: Mapping[str, str], level: float) -> Interval | None:
    """Return a rater's share of `a` among the ratings for a side."""
    decided = {item: float(rating == "a") for item, rating in own.items() if rating not in TIES}
    if not decided:
        return None
    return clustered_proportion(list(decided.values()), [prompt_of(sample, item) for item in decided], level)


def _with_themselves(sample: Sample, own: Mapping[str, str]) -> dict[str, bool]:
    """Return for each repeated item whether the rater gave the same answer, given that sides are exchanged there."""
    return {
        again: own[again] == _OTHER.get(own[item], own[item])
        for again, item in sample.repeat_of.items()
        if again in own and item in own
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float | bool]) -> float | None:
    return math.fsum(values) / len(values) if values else None
