"""Checks of the raters that gates judge: who prefers a side, who copies another, and who answers at random.

A rater or a pair with enough answers is judged alone, raters with fewer together as one. A check names those of whom it
is certain, given how many it judges, and measures these; if it names nobody, it measures all raters together.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from components.base.hashing import canonical_json
from components.human_eval.returned_labels import Labels, Sample
from components.stats.intervals import LEVEL, FloatArray, Interval, cluster_codes, clustered_proportion

TIES = ("tie", "both_bad")
"""Ratings that count 1/2 in the win rate."""
OTHER_SIDE = {"a": "b", "b": "a"}
LEAST_RATINGS, LEAST_KNOWN, LEAST_COMPARED = 20, 5, 33
"""Enough: ratings for a side, or a pair's common answers; attention checks, or three beside answers that others gave
too."""
SIDE_LEVEL, COPY_LEVEL = 0.001, 0.005
"""Probability with which the check names any of all raters by chance (Bonferroni)."""
MOST_ALIKE, SAME = 0.85, 0.95
"""Largest share of equal answers that two people are expected to have; smallest of a pair that is named."""
GUESSES, ODDS, ODDS_ALONE, MOST_AGAINST, QUALITIES = 0.07, 1.0, 8.0, 6.0, (0.7, 0.85, 1.0, 1.15)
"""Of `attention_check`: share that an attentive rater guesses; odds, and odds where attention checks decide alone; most
nats that other preferences may count; a rater's q - 1/2 over the median of all."""

Group = tuple[int, ...]
"""Raters (from 0) who are judged as one."""


class RaterCheck(NamedTuple):
    """Maps those whom a check names to what it counted; raters with too few answers to be judged alone."""

    named: dict[Group, str]
    too_few: list[int]


class RaterChecks(NamedTuple):
    """The checks of all raters together that gates judge; None if there is nothing to measure."""

    position_bias: tuple[float, float] | None
    """The largest distance of a named rater's share of `a` from a half, and the largest upper end; else that of all."""
    self_agreement: Interval | None
    """Share of repeated items with the same answer, over all raters; the interval is over prompts."""
    alike: float | None
    """The largest share of equal answers of a named pair; else that of all pairs together."""
    sides: RaterCheck
    copies: RaterCheck

    def metrics(self) -> dict[str, float]:
        """Return what could be measured, as `group/name`; a gate on a missing metric fails."""
        values = {"human_eval/raters_not_judged": float(len({*self.sides.too_few, *self.copies.too_few}))}
        if self.position_bias is not None:
            values["human_eval/position_bias"], values["human_eval/position_bias_high"] = self.position_bias
        if self.self_agreement is not None:
            values["human_eval/self_agreement"] = self.self_agreement.value
            values["human_eval/self_agreement_low"] = self.self_agreement.low
        return values | ({} if self.alike is None else {"human_eval/raters_alike": self.alike})


class AttentionCheck(NamedTuple):
    """Shares of right answers to the attention checks; `of` maps a rater (from 0) to the share."""

    lowest: Interval
    """Of the named rater whose interval begins lowest (Wilson's over items); else three times the share of all."""
    of: dict[int, float]
    careless: RaterCheck


def attention_check(
    sample: Sample, check_ratings: Labels, level: float = LEVEL, ratings: Labels | None = None
) -> AttentionCheck | None:
    """Measure how attentively each rater read; None without attention checks, 0 if nobody rated one.

    Answered at random, an attention check gets answer v with the rater's share s_v of it (`a` and `b` averaged), else
    with `GUESSES` s_v, and 1 - `GUESSES` more if v is right. In other items a rater prefers the better reply with
    probability q, at random 1/2; ties do not count. Which reply is better is inferred from all other preferences,
    weighted by their raters' q (Dawid and Skene 1979, with one q a rater, by EM from 4 right of 5). The rater's own
    likelihood is the mean over `QUALITIES`. Of m raters, those are named for whom random answers are more than m `ODDS`
    times as likely, and who missed an attention check.

    Args:
        check_ratings: the ratings of the items in `sample.attention`.
        ratings: those of the other items; without them the attention checks decide alone.
    """
    if not check_ratings:
        return None
    every = _one_hot([*check_ratings.values(), *(ratings or {}).values()])
    checks, others = every[:, : len(check_ratings)], every[:, len(check_ratings) :]
    counts = every.sum(axis=1) + 1.0
    counts[:2] = counts[:2].mean(axis=0)
    shares = counts / counts.sum(axis=0)
    rated = np.asarray(checks.any(axis=0))
    right = np.asarray((checks & _one_hot([[sample.attention[item]] for item in check_ratings])).any(axis=0))
    chance = np.where(rated, (checks * shares[:, None]).sum(axis=0), 1.0)
    nats = np.where(rated, np.log(GUESSES + (1 - GUESSES) * right / chance), 0).sum(axis=0)
    flipped = np.array([item in sample.repeat_of for item in ratings or ()], bool)[:, None]
    pairs = cluster_codes(sample.repeat_of.get(item, item) for item in ratings or ())
    agreeing, compared = _agreement(np.where(flipped, others[[1, 0, 2, 3]], others), pairs)
    n = rated.sum(axis=0)
    groups, too_few = _groups(np.where((compared >= LEAST_COMPARED) & (n > 2), LEAST_KNOWN, n), LEAST_KNOWN)
    share = float(right.sum() / max(1, n.sum()))
    lowest = [Interval(share, share, share)]
    words: dict[Group, str] = {}
    for group in groups:
        odds = len(groups) * (ODDS if compared[[*group]].sum() >= LEAST_COMPARED else ODDS_ALONE)
        values = right[:, group][rated[:, group]].astype(float)
        evidence = nats[[*group]].sum() + max(-MOST_AGAINST, agreeing[[*group]].sum())
        if evidence < -math.log(odds) and not values.all():
            lowest.append(clustered_proportion(values, range(len(values)), level))
            words[group] = f"{values.sum():.0f} of {len(values)} attention checks are right"
    of = {r: float(right[:, r].sum() / count) for r, count in enumerate(n) if count}
    return AttentionCheck(min(lowest[1:] or lowest, key=lambda interval: interval.low), of, RaterCheck(words, too_few))


def rater_checks(sample: Sample, labels: Labels, level: float = LEVEL) -> RaterChecks:
    """Compute the checks of all raters together."""
    columns = [{i: v for i, v in zip(labels, cells, strict=True) if v} for cells in zip(*labels.values(), strict=True)]
    again = [pair for ratings in columns for pair in with_themselves(sample, ratings).items()]
    prompts = [prompt_of(sample, item) for item, _ in again]
    same = clustered_proportion([float(value) for _, value in again], prompts, level) if again else None
    (bias, sides), (alike, copies) = _sides(sample, columns, level), _alike(_one_hot(labels.values()))
    return RaterChecks(bias, same, alike, sides, copies)


def named_raters(checks: RaterChecks, attention: AttentionCheck | None) -> list[str]:
    """Return sentences: whom each check names, then whom it could not judge alone."""
    every = [(checks.sides, "preferring a side, whichever reply it shows"), (checks.copies, "copied answers")]
    every += [(attention.careless, "answering as if at random")] if attention else []
    certain = [f"{_are(raters)} named for {what}: {of}." for check, what in every for raters, of in check.named.items()]
    few = [f"{_are(check.too_few)} not judged alone for {what}: too few answers." for check, what in every
           if check.too_few]  # fmt: skip
    return certain + few


def prompt_of(sample: Sample, item: str) -> str:
    """Return an item's prompt as the key by which intervals are clustered."""
    return canonical_json(sample.responses[item]["prompt"])


def side_a(sample: Sample, ratings: Iterable[tuple[str, str]], level: float) -> Interval | None:
    """Return the share of `a` among the ratings for a side, of pairs of item and rating."""
    decided = [(prompt_of(sample, item), float(rating == "a")) for item, rating in ratings if rating not in TIES]
    return clustered_proportion([a for _, a in decided], [prompt for prompt, _ in decided], level) if decided else None


def with_themselves(sample: Sample, ratings: Mapping[str, str]) -> dict[str, bool]:
    """Return for each repeated item whether the rater gave the same answer, given that sides are exchanged there."""
    return {
        again: ratings[again] == OTHER_SIDE.get(ratings[item], ratings[item])
        for again, item in sample.repeat_of.items()
        if again in ratings and item in ratings
    }


def _sides(
    sample: Sample, columns: Sequence[Mapping[str, str]], level: float
) -> tuple[tuple[float, float] | None, RaterCheck]:
    decided = [[(item, rating) for item, rating in ratings.items() if rating not in TIES] for ratings in columns]
    groups, too_few = _groups(map(len, decided), LEAST_RATINGS)
    named: dict[Group, str] = {}
    bias: list[tuple[float, float]] = []
    for group in groups:
        ratings = [rating for r in group for rating in decided[r]]
        certain, interval = (side_a(sample, ratings, at) for at in (1 - SIDE_LEVEL / len(groups), level))
        if certain and interval and not certain.low <= 0.5 <= certain.high:
            bias.append((abs(interval.value - 0.5), max(0.5 - interval.low, interval.high - 0.5)))
            named[group] = f"{sum(v == 'a' for _, v in ratings)} of {len(ratings)} ratings for a side are `a`"
    every = side_a(sample, itertools.chain(*decided), level)
    bias = bias or ([(abs(every.value - 0.5),) * 2] if every else [])
    return (max(v for v, _ in bias), max(high for _, high in bias)) if bias else None, RaterCheck(named, too_few)


def _alike(answers: NDArray[np.bool_]) -> tuple[float | None, RaterCheck]:
    """Return the share of equal answers, and the pairs that have more of them than chance gives.

    The number of a pair's equal answers is compared with a binomial one. Its chance is what the two raters' own shares
    of each answer give, sum_v s_v t_v, or their share of equal answers with all others, up to `MOST_ALIKE`, if larger.

    Args:
        answers: (V, I, R) whether rater r gave answer v to item i.
    """
    votes, rated = answers.astype(float), answers.any(axis=0).astype(float)
    in_common = votes.transpose(0, 2, 1) @ rated  # (V, R, R): rater r's answers v to items that rater s rated too
    apart = 1 - np.eye(rated.shape[1])
    common, equal = rated.T @ rated * apart, np.einsum("vir,vis->rs", votes, votes) * apart
    n, same = (table.sum(0)[:, None] + table.sum(0) - 2 * table for table in (common, equal))
    with_others = np.where(n > 0, same / np.maximum(n, 1), 1).clip(max=MOST_ALIKE)
    chance = np.maximum(with_others, np.einsum("vrs,vsr->rs", in_common, in_common) / np.maximum(common, 1) ** 2)
    comparable = np.triu(common >= LEAST_RATINGS)
    tail = stats.binom.sf(equal - 1, common, chance)
    pairs = np.argwhere(comparable & (equal > SAME * common) & (tail < COPY_LEVEL / max(1, comparable.sum()))).tolist()
    named: dict[Group, str] = {(i, j): f"{equal[i, j]:.0f} of {common[i, j]:.0f} answers are equal" for i, j in pairs}
    every = float(equal.sum() / common.sum()) if common.sum() >= 2 * LEAST_RATINGS else None
    too_few = np.flatnonzero(rated.any(axis=0) & ~(comparable | comparable.T).any(axis=0)).tolist()
    return max((float(equal[i, j] / common[i, j]) for i, j in pairs), default=every), RaterCheck(named, too_few)


def _agreement(answers: NDArray[np.bool_], pairs: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
    """Return by how many nats (R,) each rater's preferences speak against random ones (`attention_check`), and how many
    answers have others to the same pair of replies; `answers` (V, I, R), `pairs` (I,)."""
    of_pair = np.zeros((len(pairs), len(answers), answers.shape[2]))
    np.add.at(of_pair, pairs, answers.transpose(1, 0, 2))
    a, b = of_pair[:, 0], of_pair[:, 1]
    lead, compared = a - b, of_pair.sum(axis=1)
    compared *= compared.sum(axis=1, keepdims=True) > 1
    decided = (a + b) * ((a + b).sum(axis=1, keepdims=True) > 1)
    quality = np.full(answers.shape[2], 0.8)
    for _ in range(30):
        better = special.expit(lead @ special.logit(quality))[:, None]  # whether a is better
        right = np.where(decided, a * better + b * (1 - better), 0).sum(axis=0)
        quality = ((right + 4) / (decided.sum(axis=0) + 5)).clip(0.05, 0.97)
    by_others = special.expit((lead @ special.logit(quality))[:, None] - lead * special.logit(quality))
    typical = max(0.5, np.median(quality[decided.any(axis=0)])) if decided.any() else 0.5
    q = (0.5 + (typical - 0.5) * np.array(QUALITIES))[:, None, None].clip(max=0.97)
    odds = by_others * (2 * q) ** a * (2 - 2 * q) ** b + (1 - by_others) * (2 - 2 * q) ** a * (2 * q) ** b
    return special.logsumexp(np.log(odds).sum(axis=1), axis=0, b=1 / len(q)), compared.sum(axis=0)


def _one_hot(rows: Iterable[Sequence[str]]) -> NDArray[np.bool_]:
    """Return whether rater r gave answer v to item i, (V, I, R)."""
    table = np.array(list(rows))
    return np.array([table == answer for answer in ("a", "b", *TIES)])


def _groups(counts: Iterable[int], least: int) -> tuple[list[Group], list[int]]:
    """Return each rater with `least` answers, then the others as one if they have as many; and these others."""
    numbers = [int(n) for n in counts]
    few = [r for r, n in enumerate(numbers) if 0 < n < least]
    alone: list[Group] = [(r,) for r, n in enumerate(numbers) if n >= least]
    return [*alone, *([tuple(few)] if sum(numbers[r] for r in few) >= least else [])], few


def _are(raters: Sequence[int]) -> str:
    numbers = ", ".join(str(r + 1) for r in raters)
    return f"Raters {numbers} are" if len(raters) > 1 else f"Rater {numbers} is"
