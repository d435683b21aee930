"""Summarise a batch for the administrator, without its key: progress, agreement, each rater's habits and time."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import Connection, func, select

from components.human_eval.sheet import FLAGS
from components.stats.annotator_votes import fleiss_kappa
from components.stats.intervals import Interval, clustered_proportion
from flows.review.answer_progress import progress_of
from flows.review.database.tables import item, rater, slot, vote
from flows.review.personal_links import raters_of
from flows.review.rater_votes import SKIP, Voting, unexchanged
from tasks.runs.awaited_labels import LabelProgress

_COMMENTS = 20
_SIDES = ("a", "b")


class CountedAnswer(NamedTuple):
    """An answer that counts, with the sides as in the sheet."""

    item: str
    rater: int
    """The rater's number."""
    answer: str
    """One of the sheet's ratings, or `skip`."""
    answer_as_shown: str
    criteria: dict[str, str]
    flags: list[str]
    comment: str
    seconds: float | None
    at: float


class ReviewerSummary(NamedTuple):
    """One rater's row."""

    number: int
    name: str
    answered: int
    skipped: int
    late: int
    seconds: float | None
    """The median time per answer."""
    side_a: Interval | None
    """Share of the first reply shown, among the answers that choose a side."""
    leans: bool
    """Whether the interval of `side_a` excludes 0.5."""
    agreement: float | None
    """Share of other raters' answers to the same items that equal this rater's."""
    last: str


class BatchSummary(NamedTuple):
    """The content of the administrator's page."""

    progress: LabelProgress
    kappa: Interval | None
    compared: int
    late: int
    undone: int
    raters: list[ReviewerSummary]
    flags: list[tuple[str, int]]
    comments: list[tuple[str, str, str]]


def counted_answers(connection: Connection, number: int) -> list[CountedAnswer]:
    """Return the counted answers of the batch `number`, in the sheet's order."""
    rows = connection.execute(
        select(item.c.name, rater.c.number, vote)
        .join_from(slot, vote, vote.c.id == slot.c.vote)
        .join(item, item.c.id == slot.c.item)
        .join(rater, rater.c.id == vote.c.rater)
        .where(slot.c.batch == number)
        .order_by(slot.c.place, rater.c.number)
    )
    return [
        CountedAnswer(
            row.name, row.number, unexchanged(row.answer, row.shown), row.answer,
            {name: unexchanged(answer, row.shown) for name, answer in json.loads(row.criteria).items()},
            json.loads(row.flags), row.comment, row.seconds, row.at,
        )
        for row in rows
    ]  # fmt: skip


def summary(voting: Voting) -> BatchSummary:
    """Return the current summary of a batch."""
    with voting.engine.connect() as connection:
        progress = progress_of(connection, voting.batch.id)
        answers = counted_answers(connection, voting.batch.id)
        others = connection.execute(
            select(rater.c.number, vote.c.late, func.count())
            .join_from(vote, rater, rater.c.id == vote.c.rater)
            .where(rater.c.batch == voting.batch.id, (vote.c.answer.is_(None)) | vote.c.late)
            .group_by(rater.c.number, vote.c.late)
        ).all()
    names = dict(raters_of(voting.engine, voting.batch.id))
    late = {number: n for number, was_late, n in others if was_late}
    by_item: dict[str, dict[int, str]] = {answer.item: {} for answer in answers}  # without skipped ones
    for answer in (answer for answer in answers if answer.answer != SKIP):
        by_item[answer.item][answer.rater] = answer.answer
    table = [
        [list(ratings.values()).count(rating) for rating in voting.batch.ratings]
        for ratings in by_item.values()
        if len(ratings) > 1
    ]
    commented = sorted((answer for answer in answers if answer.comment), key=lambda answer: -answer.at)[:_COMMENTS]
    flagged = Counter(flag for answer in answers for flag in answer.flags)
    kappa = fleiss_kappa(table) if table else None
    if kappa is not None and not math.isfinite(kappa.value):  # undefined, for example with only one rating
        kappa = None
    return BatchSummary(
        progress, kappa, len(table), sum(late.values()), sum(n for _, was_late, n in others if not was_late),
        [_of_rater(n, name, answers, by_item, late.get(n, 0)) for n, name in names.items()],
        [(FLAGS[name], n) for name, n in flagged.most_common()],
        [(answer.item, names[answer.rater], answer.comment) for answer in commented],
    )  # fmt: skip


def _of_rater(
    number: int, name: str, answers: Sequence[CountedAnswer], by_item: Mapping[str, Mapping[int, str]], late: int
) -> ReviewerSummary:
    of_rater = [answer for answer in answers if answer.rater == number]
    sided = [float(answer.answer_as_shown == "a") for answer in of_rater if answer.answer in _SIDES]
    side = clustered_proportion(sided, range(len(sided))) if sided else None
    alike = [
        answer.answer == other
        for answer in of_rater
        if answer.answer != SKIP
        for who, other in by_item[answer.item].items()
        if who != number
    ]
    times = [answer.seconds for answer in of_rater if answer.seconds is not None]
    last = max((answer.at for answer in of_rater), default=None)
    return ReviewerSummary(
        number, name, len(of_rater), sum(answer.answer == SKIP for answer in of_rater), late,
        statistics.median(times) if times else None, side, side is not None and not side.low <= 0.5 <= side.high,
        sum(alike) / len(alike) if alike else None,
        "" if last is None else datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )  # fmt: skip


