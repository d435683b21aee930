"""Compute a lower bound on a run's win rate before all answers are in. It opens the key: the page never imports it."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from components.human_eval.results.summary import rating_score
from components.human_eval.returned_labels import Sample
from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.intervals import LEVEL
from flows.review.batch_summary import CountedAnswer, counted_answers
from flows.review.rater_votes import SKIP


class EarlyBound(NamedTuple):
    """A bound that stays valid no matter how often it is computed."""

    low: float
    """A lower bound on these raters' win rate, with confidence 1 - `alpha`."""
    low_of_people: float
    """A lower bound on the win rate among all people, with the same confidence."""
    items: int
    """Number of items it is based on: in the sheet's order, up to the first that is not fully answered."""
    items_asked: int
    alpha: float


def early_bound(engine: Engine, number: int, folder: Path, overlap: int, level: float = LEVEL) -> EarlyBound:
    """Return the always-valid bound for the batch `number`, whose sample artifact is `folder`.

    Items are used in the sheet's order and only with all their answers, so that neither order nor number depends on the
    answers. Repeated items, attention checks, and items that nobody could judge are left out.

    Raises:
        UserError: as `Sample.open`.
    """
    sample = Sample.open(folder)
    with engine.connect() as connection:
        answers = counted_answers(connection, number)
    by_item: dict[str, list[CountedAnswer]] = {}
    for answer in answers:
        by_item.setdefault(answer.item.split("-")[0], []).append(answer)
    named = (name.split("-")[0] for name in sample.texts)
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
    """Yield the score by rater of each fully answered item, up to the first item that is not fully answered."""
    for item in order:
        answers = by_item.get(item, ())
        if len(answers) < overlap:
            return
        scores = {a.rater: rating_score(a.answer, sample.policy_side[item]) for a in answers if a.answer != SKIP}
        if scores:
            yield scores
