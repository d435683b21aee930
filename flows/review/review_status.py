"""Print what a batch's page knows, in the terminal, and a lower bound on a run's win rate before all answers are in.

Computing the bound opens the key to the blinded sheet, so the page never imports this module.
"""

import math
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import Engine

from components.base.text import counted
from components.human_eval.results.summary import rating_score
from components.human_eval.returned_labels import Sample
from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.intervals import LEVEL, Interval
from flows.review.batch_summary import BatchSummary, CountedAnswer, counted_answers
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
    rated: list[dict[int, float]] = []
    for item in order:
        to_item = by_item.get(item, ())
        if len(to_item) < overlap:
            break
        side = sample.policy_side[item]
        if scores := {one.rater: rating_score(one.answer, side) for one in to_item if one.answer != SKIP}:
            rated.append(scores)
    alpha = (1 - level) / 2
    if not rated:
        return EarlyBound(0.0, 0.0, 0, len(order), alpha)
    raters = sorted({rater for scores in rated for rater in scores})
    ratings = [[scores.get(rater, math.nan) for rater in raters] for scores in rated]
    low = always_valid_low([statistics.fmean(scores.values()) for scores in rated], alpha)
    of_people = always_valid_low_of_people(ratings, alpha)
    return EarlyBound(float(low[-1]), float(of_people[-1]), len(rated), len(order), alpha)


def as_text(summary: BatchSummary, bound: EarlyBound | None) -> str:
    """Return the status as text."""
    lines = [
        f"Page: {summary.progress.address or 'not served'}, {summary.progress.text}",
        f"Agreement (Fleiss' kappa) on {counted(summary.compared, 'item')}: {_interval(summary.kappa)}",
    ]
    for rater in summary.raters:
        time = "-" if rater.seconds is None else f"{rater.seconds:.0f} s"
        lean = ", leans to a side" if rater.leans else ""
        lines.append(
            f"  {rater.number}. {rater.name}: {rater.answered} answered, {rater.skipped} skipped, "
            f"{rater.late} too late, {time} each, share of A {_interval(rater.side_a)}{lean}"
        )
    if bound is not None:
        lines.append(
            f"Win rate of these raters above {bound.low:.3f}, of all people above {bound.low_of_people:.3f} (always "
            f"valid, {1 - bound.alpha:.1%} one-sided), on the first {bound.items} of {bound.items_asked} items"
        )
        if bound.low_of_people > 0.5:
            lines.append("People prefer the policy to SFT: you may stop here.")
        elif bound.low > 0.5:
            lines.append("These raters prefer the policy to SFT; others may not: continue, or ask more people.")
    return "\n".join(lines)


def as_record(summary: BatchSummary, bound: EarlyBound | None) -> dict[str, Any]:
    """Return the status as a JSON object."""
    return {
        "raters": [
            rater._asdict() | {"side_a": rater.side_a and rater.side_a._asdict()} for rater in summary.raters
        ],
        "kappa": None if summary.kappa is None else summary.kappa.named("kappa"),
        "late": summary.late,
        "undone": summary.undone,
        "bound": None if bound is None else bound._asdict(),
    }


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    ends = f" ({interval.low:.2f} to {interval.high:.2f})" if math.isfinite(interval.low) else ""
    return f"{interval.value:.2f}{ends}"
