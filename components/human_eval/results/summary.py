"""What raters' answers say of the raters: whether they lean to a side, agree with themselves, or copied each other."""

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
"""Ratings that count a half in the win rate."""
_OTHER = {"a": "b", "b": "a"}


class SideShare(TypedDict):
    """Share of a rater's ratings `a` among those for a side, with its interval over prompts."""

    value: float
    low: float
    high: float


class RaterSummary(TypedDict):
    """What one rater's ratings say; shares are None where there is nothing to share out."""

    rater: str
    n: int
    win_rate: float | None
    a: float | None
    b: float | None
    """Shares of either side."""
    ties: float | None
    """Share of ties; `both_bad` is not among them."""
    both_bad: float | None
    side_a: SideShare | None
    """Far from a half is a habit, not a judgement: each author stands on either side equally often."""
    agreement: float | None
    """Share of other raters' ratings of the same items that theirs agree with."""
    self_agreement: float | None
    """Share of the repeated items that they answered alike both times."""
    attention: float | None
    """Share of the items with a known right answer that they answered rightly."""
    seconds: float | None
    """Median for an item, where the tool that they rated in measured it."""


class StratumSummary(TypedDict):
    """The policy's win rate over the rated items of a stratum, with its interval over prompts."""

    stratum: str
    n: int
    win_rate: float
    low: float
    high: float


class RaterChecks(NamedTuple):
    """What gates judge of all raters together; None where there is nothing to measure it on."""

    position_bias: tuple[float, float] | None
    """The largest distance of a rater's share of `a` from a half, and the largest upper end of one."""
    self_agreement: Interval | None
    """Share of repeated items answered alike, over all raters; the interval is over prompts."""
    alike: float | None
    """The largest share of equal ratings between two raters, of the items that both rated."""


class AttentionCheck(NamedTuple):
    """Shares of right answers to the items whose right answer is known."""

    lowest: Interval
    """Of the rater whose interval starts lowest; the interval is Wilson's over their items."""
    of: dict[int, float]
    """By rater (from 0)."""


def attention_check(sample: Sample, labels: Labels, level: float = LEVEL) -> AttentionCheck | None:
    """How attentively each rater read; None without such items, 0 if nobody rated one.

    Args:
        labels: of the items in `sample.attention`.
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
    """Mean over the ratings given of 1 where the policy's side is preferred, a half for a tie (`both_bad` is one), 0
    otherwise."""
    values = [rating_score(rating, policy_side) for rating in ratings if rating]
    return sum(values) / len(values)


def rating_scores(ratings: Sequence[str], policy_side: str) -> list[float]:
    """Each rating's score, NaN where it is missing."""
    return [rating_score(rating, policy_side) if rating else math.nan for rating in ratings]


def rating_score(rating: str, policy_side: str) -> float:
    """1 where the policy's side is preferred, a half for a tie or `both_bad`, 0 otherwise."""
    return 0.5 if rating in TIES else float(rating == policy_side)


def prompt_of(sample: Sample, item: str) -> str:
    """An item's prompt as what intervals are clustered by."""
    return canonical_json(sample.responses[item]["prompt"])


def per_rater(
    sample: Sample,
    labels: Labels,
    level: float = LEVEL,
    seconds: Seconds = MappingProxyType({}),
    attention: AttentionCheck | None = None,
) -> Iterator[RaterSummary]:
    """A summary of each rater; only position, self-agreement and time count the repeated items."""
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
    """Judge all raters together."""
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
    """The win rate of each stratum."""
    found: dict[str, list[str]] = {}
    for item in scores:
        found.setdefault(sample.responses[item]["stratum"], []).append(item)
    rows: list[StratumSummary] = []
    for name, items in sorted(found.items()):
        win = clustered_proportion([scores[i] for i in items], [prompt_of(sample, i) for i in items], level)
        rows.append({"stratum": name, "n": len(items), "win_rate": win.value, "low": win.low, "high": win.high})
    return rows


def _side_a(sample: Sample, own: Mapping[str, str], level: float) -> Interval | None:
    """A rater's share of `a` among their ratings for a side."""
    decided = {item: float(rating == "a") for item, rating in own.items() if rating not in TIES}
    if not decided:
        return None
    return clustered_proportion(list(decided.values()), [prompt_of(sample, item) for item in decided], level)


def _with_themselves(sample: Sample, own: Mapping[str, str]) -> dict[str, bool]:
    """Whether a rater answered alike, by repeated item: a side is the other one there."""
    return {
        again: own[again] == _OTHER.get(own[item], own[item])
        for again, item in sample.repeat_of.items()
        if again in own and item in own
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float | bool]) -> float | None:
    return math.fsum(values) / len(values) if values else None
