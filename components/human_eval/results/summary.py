"""Scores of ratings, and summaries by rater and by stratum."""

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from components.human_eval.results.checks import TIES, AttentionCheck, prompt_of, side_a, with_themselves
from components.human_eval.returned_labels import Labels, Sample, Seconds, rated_columns
from components.stats.intervals import LEVEL, clustered_proportion


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


def scored_ratings(sample: Sample, rated: Labels) -> Iterator[tuple[str, int, float]]:
    """Yield item, rater (from 0) and `rating_score` of each given rating."""
    for item, ratings in rated.items():
        for rater, rating in enumerate(ratings):
            if rating:
                yield item, rater, rating_score(rating, sample.policy_side[item])


def per_rater(
    sample: Sample,
    labels: Labels,
    level: float = LEVEL,
    seconds: Seconds = MappingProxyType({}),
    attention: AttentionCheck | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a summary of each rater. Repeated items count only for `side_a`, `self_agreement` and `seconds` (a median).

    A share is None if there is nothing to compute it from. `ties` leaves out `both_bad`. `side_a` is the share of `a`
    among the ratings for a side, with its interval over prompts: far from 1/2 it shows a position bias, since each
    author is on either side equally often. `agreement` is the share of other raters' ratings of the same items with
    which this rater's agree, `self_agreement` that of repeated items with the same answer both times.
    """
    for index, column in enumerate(rated_columns(labels)):
        ratings = {item: row[index] for item, row in labels.items() if row[index]}
        first = {item: rating for item, rating in ratings.items() if item not in sample.repeat_of}
        kinds = Counter(first.values())
        others = [
            first[item] == other for item in first for i, other in enumerate(labels[item]) if i != index and other
        ]
        wins = [item_score([rating], sample.policy_side[item]) for item, rating in first.items()]
        alike = list(with_themselves(sample, ratings).values())
        side = side_a(sample, ratings.items(), level)
        yield {
            "rater": column,
            "n": len(first),
            "win_rate": _mean(wins),
            "a": kinds["a"] / len(first) if first else None,
            "b": kinds["b"] / len(first) if first else None,
            "ties": kinds["tie"] / len(first) if first else None,
            "both_bad": kinds["both_bad"] / len(first) if first else None,
            "side_a": None if side is None else side._asdict(),
            "agreement": _mean(others),
            "self_agreement": _mean(alike),
            "attention": None if attention is None else attention.of.get(index),
            "seconds": _median([taken for (_, rater), taken in seconds.items() if rater == index]),
        }


def by_stratum(sample: Sample, scores: Mapping[str, float], level: float = LEVEL) -> list[dict[str, Any]]:
    """Return the policy's win rate over the rated items of each stratum, with its interval over prompts."""
    members: dict[str, list[str]] = {}
    for item in scores:
        members.setdefault(sample.responses[item]["stratum"], []).append(item)
    rows = []
    for name, items in sorted(members.items()):
        win = clustered_proportion([scores[i] for i in items], [prompt_of(sample, i) for i in items], level)
        rows.append({"stratum": name, "n": len(items), "win_rate": win.value, "low": win.low, "high": win.high})
    return rows


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _mean(values: Sequence[float | bool]) -> float | None:
    return math.fsum(values) / len(values) if values else None
