"""A lower bound on a run's win rate while answers still come in. It opens the key: no part of the page imports it."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from components.human_eval.labels import Sample
from components.human_eval.results.summary import rating_score
from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.intervals import LEVEL
from flows.review.summary import CountedAnswer, counted_answers
from flows.review.votes import SKIP


class EarlyBound(NamedTuple):
    """What may be known at any time."""

    low: float
    """These raters' win rate is above this, with the confidence that `alpha` says, however often one looks."""
    low_of_people: float
    """And that of all people above this."""
    items: int
    """Items that it rests on: in the sheet's order up to the first that is not answered in full."""
    items_asked: int
    alpha: float


def early_bound(engine: Engine, number: int, folder: Path, overlap: int, level: float = LEVEL) -> EarlyBound:
    """Return the always-valid bound of the batch of that number, whose sample artifact is `folder`.

    Items come in the sheet's order, each with all its answers, so that neither their order nor their number depends on
    what was answered. Repeated items, those whose answer is known, and those that nobody could judge are left out.

    Raises:
        UserError: as `Sample.open`.
    """
    sample = Sample.open(folder)
    with engine.connect() as connection:
        answers = counted_answers(connection, number)
    by_item: dict[str, list[CountedAnswer]] = {}
    for each in answers:
        by_item.setdefault(each.item.split("-")[0], []).append(each)
    named = (name.split("-")[0] for name in sample.given)
    order = [item for item in named if item in sample.policy_side and item not in sample.repeat_of]
    rated = list(_rated(sample, order, by_item, overlap))
    alpha = (1 - level) / 2
    if not rated:
        return EarlyBound(0.0, 0.0, 0, len(order), alpha)
    raters = sorted({rater for scores in rated for rater in scores})
    ratings = [[scores.get(rater, math.nan) for rater in raters] for scores in rated]
    low = always_valid_low([statistics.fmean(scores.values()) for scores in rated], alpha)
    of_people = always_valid_low_of_people(ratings, alpha)
    return EarlyBound(float(low[-1]), float(of_people[-1]), len(rated), len(order), alpha)


def _rated(
    sample: Sample, order: Sequence[str], by_item: Mapping[str, Sequence[CountedAnswer]], overlap: int
) -> Iterator[dict[int, float]]:
    """Of each item that is answered in full, the score that each rater gave."""
    for item in order:
        answers = by_item.get(item, ())
        if len(answers) < overlap:
            return
        scores = {a.rater: rating_score(a.answer, sample.policy_side[item]) for a in answers if a.answer != SKIP}
        if scores:
            yield scores
