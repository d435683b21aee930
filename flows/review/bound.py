"""A lower bound on a run's win rate while answers still come in. It opens the key: no part of the page imports it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Engine

from components.human_eval.labels import Sample
from components.human_eval.results.summary import item_score
from components.stats.betting import always_valid_low
from components.stats.intervals import LEVEL
from flows.review.summary import CountedAnswer, counted_answers
from flows.review.votes import SKIP


class EarlyBound(NamedTuple):
    """What may be known at any time."""

    low: float
    """The win rate is above this, with the confidence that `alpha` says, however often one looks."""
    items: int
    """Items that it rests on: in the sheet's order up to the first that is not answered in full."""
    items_asked: int
    alpha: float


def early_bound(engine: Engine, number: int, folder: Path, overlap: int, level: float = LEVEL) -> EarlyBound:
    """The always-valid bound of the batch of that number, whose sample artifact is `folder`.

    Items enter in the sheet's order, each with all its answers, so that neither their order nor their number depends on
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
    scores = list(_scores(sample, order, by_item, overlap))
    alpha = (1 - level) / 2
    low = float(always_valid_low(scores, alpha)[-1]) if scores else 0.0
    return EarlyBound(low, len(scores), len(order), alpha)


def _scores(
    sample: Sample, order: Sequence[str], by_item: Mapping[str, Sequence[CountedAnswer]], overlap: int
) -> list[float]:
    scores = []
    for item in order:
        answers = by_item.get(item, ())
        if len(answers) < overlap:
            break
        ratings = [each.answer for each in answers if each.answer != SKIP]
        if ratings:
            scores.append(item_score(ratings, sample.policy_side[item]))
    return scores
