"""Intervals of a share that people judged, over both items and raters, and the power of such a study."""

import bisect
import math
from collections.abc import Hashable, Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special
from scipy.optimize import brentq

from components.stats.intervals import LEVEL, FloatArray, Interval, cluster_codes, wilson

FEWEST_RATERS = 8
"""With fewer raters the spread between people is uncertain: the interval is shown with a warning (`too_few_raters`)."""


def crossed_proportion(
    values: ArrayLike,
    items: Iterable[Hashable],
    raters: Iterable[Hashable],
    clusters: Iterable[Hashable] | None = None,
    level: float = LEVEL,
) -> Interval:
    """Return the mean over items of their mean rating, `values` (n,) in [0, 1], with interval over prompts and raters.

    An interval over prompts alone holds for these raters only. To hold for other people too, it must allow the ratings
    of one rater to be dependent. With m the mean, u the ratings' influences, clusters c (prompts) and raters r,

        V = C / (C - 1) sum_c (sum_c u)^2 + R / (R - 1) sum_r (sum_r u)^2 - sum_cr (sum_cr u)^2

    (Cameron, Gelbach and Miller 2011, JBES 29:238, two-way clustering: the sum of u_i u_j over all pairs i, j that
    share a cluster or a rater, with a correction for few groups in the first two terms). V is at least as large as
    either of these. The ends are those of Wilson's interval at the effective sample size m (1 - m) / V, with Student's
    t at the degrees of freedom of a sum of mean squares (Satterthwaite 1946, Biometrics Bulletin 2:110). With one rater
    the spread between people is unknown, and the interval is [0, 1] if `values` differ. If all values are equal, each
    cluster is one draw.

    Args:
        items: (n,) the item of each rating; items weigh the same, however many people rated them.
        raters: (n,) the rater of each rating.
        clusters: (n,) groups within which ratings may be dependent, as items of one prompt; default: `items`.
    """
    y = np.asarray(values, dtype=np.float64)
    item, rater = cluster_codes(items), cluster_codes(raters)
    cluster = item if clusters is None else cluster_codes(clusters)
    weights = 1 / np.bincount(item)[item] / (item.max() + 1)
    mean = float(np.clip(weights @ y, y.min(), y.max()))  # against rounding: stay within the values
    variance, freedom = _variance(weights * (y - mean), cluster, rater)
    return wilson(mean, variance, freedom, int(cluster.max()) + 1, level)


def _variance(u: FloatArray, cluster: NDArray[np.int64], rater: NDArray[np.int64]) -> tuple[float, float]:
    """Return V and its degrees of freedom; NaN with one cluster or one rater."""
    clusters, raters = int(cluster.max()) + 1, int(rater.max()) + 1
    if clusters < 2 or raters < 2:
        return math.nan, math.nan
    cells = cluster * raters + rater
    by_cluster, by_rater, by_cell = (
        float(np.square(np.bincount(codes, weights=u)).sum()) for codes in (cluster, rater, cells)
    )
    return _crossed(by_cluster * clusters / (clusters - 1), by_rater * raters / (raters - 1), by_cell, clusters, raters)


def _crossed(by_cluster: float, by_rater: float, by_cell: float, clusters: int, raters: int) -> tuple[float, float]:
    """Return V from its parts, which is at least as large as either of the first two, and its degrees of freedom."""
    both = by_cluster + by_rater - by_cell
    variance = max(both, by_cluster, by_rater)
    spread = by_cluster**2 / (clusters - 1) + by_rater**2 / (raters - 1)
    if variance == both:
        spread += by_cell**2 / ((clusters - 1) * (raters - 1))
    return variance, max(variance**2 / spread, 1.0) if spread > 0 else float(min(clusters, raters) - 1)


def crossed_agreement(
    votes: ArrayLike, predicted: ArrayLike, clusters: Iterable[Hashable], level: float = LEVEL
) -> Interval:
    """Return how often `predicted` (I,) has the sign of the votes' majority, with an interval over prompts and raters.

    Items whose votes tie are left out. A majority is not a mean of votes, so a rater's influence is found by leaving
    that rater out. With theta_r the agreement with the other raters' majorities,

        V = C / (C - 1) sum_c (sum_c u)^2 + (R - 1) / R sum_r (theta_r - mean theta)^2 - ((R - 1) / R)^2 sum_cr d_cr^2

    where d_cr is cluster c's contribution to theta_r - theta, so that the last term removes the noise counted twice. V
    is at least as large as either of the first two terms. The ends are computed as in `crossed_proportion`. The
    interval covers a little more than its level, since leaving a rater out also creates ties
    (docs/benchmarks/people.md). With one rater the interval is [0, 1].

    Args:
        votes: (I, R) 1 or -1 for a side, 0 for neither, NaN where rater r did not rate item i.
        predicted: (I,) positive predicts 1, negative predicts -1; 0 counts as half right.
        clusters: (I,) groups within which items may be dependent, as items of one prompt.

    Raises:
        ValueError: no item has a majority.
    """
    table, sign = np.asarray(votes, dtype=np.float64), np.sign(np.asarray(predicted, dtype=np.float64))
    cluster = cluster_codes(clusters)
    table = table[:, ~np.isnan(table).all(axis=0)]  # drop raters without a rating
    raters, filled = table.shape[1], np.nan_to_num(table)
    lead = filled.sum(axis=1)

    def influence(lead: FloatArray, about: float | None = None) -> tuple[float, FloatArray]:
        """Return the agreement with the majorities in `lead`, and each cluster's part of it minus `about`."""
        decided = lead != 0
        if not decided.any():
            return math.nan, np.full(int(cluster.max()) + 1, math.nan)
        right = np.where(sign == 0, 0.5, (sign == np.sign(lead)).astype(np.float64))
        mean = float(right[decided].mean())
        parts = np.where(decided, right - (mean if about is None else about), 0.0) / decided.sum()
        return mean, np.bincount(cluster, weights=parts).astype(np.float64)

    mean, contributions = influence(lead)
    if math.isnan(mean):
        raise ValueError("no item is decided")
    counting = np.unique(cluster[lead != 0]).size
    without = [influence(lead - filled[:, rater], mean) for rater in range(raters)]
    thetas = np.array([theta for theta, _ in without])
    if raters < 2 or counting < 2 or np.isnan(thetas).any():
        return Interval(mean, 0.0, 1.0)
    by_cluster = counting / (counting - 1) * float(np.square(contributions).sum())
    by_rater = (raters - 1) / raters * float(np.square(thetas - thetas.mean()).sum())
    cells = ((raters - 1) / raters) ** 2 * sum(float(np.square(part - contributions).sum()) for _, part in without)
    return wilson(mean, *_crossed(by_cluster, by_rater, cells, counting, raters), counting, level)


def power(
    items: int,
    raters: int,
    per_item: int,
    win_rate: float,
    ties: float = 0.15,
    item_spread: float = 1.0,
    rater_spread: float = 0.3,
    level: float = LEVEL,
    draws: int = 500,
    seed: int = 0,
) -> float:
    """Simulate the probability that the lower end of `crossed_proportion` is above 1/2.

    A rating is a tie with probability `ties`, else a win with probability expit(a + item + rater). The item and rater
    effects are normal with standard deviations `item_spread` and `rater_spread`; a is chosen so that the win rate, with
    ties as 1/2, is `win_rate`.

    Args:
        per_item: ratings of each item, by this many of the `raters`, drawn at random for each item.
        item_spread, rater_spread: in logits; for raters 0.3 is small and 1 is large.

    Raises:
        ValueError: `per_item` is above `raters`, or `win_rate` is impossible with this share of ties.
    """
    if not 0 < per_item <= raters:
        raise ValueError(f"{per_item} ratings of each item by {raters} raters")
    shift = _shift(win_rate, ties, math.hypot(item_spread, rater_spread))
    random = np.random.default_rng(seed)
    item = np.repeat(np.arange(items), per_item)
    significant = 0
    for _ in range(draws):
        rater = np.argsort(random.random((items, raters)), axis=1)[:, :per_item].ravel()
        logit = shift + item_spread * random.standard_normal(items)[item]
        logit += rater_spread * random.standard_normal(raters)[rater]
        won = random.random(item.size) < special.expit(logit)
        scores = np.where(random.random(item.size) < ties, 0.5, won)
        significant += crossed_proportion(scores, item, rater, level=level).low > 0.5
    return significant / draws


def _shift(win_rate: float, ties: float, spread: float) -> float:
    """Return the mean logit at which the share of wins, with ties as 1/2, is `win_rate`."""
    decided = (win_rate - ties / 2) / (1 - ties) if ties < 1 else math.nan
    if not 0 < decided < 1:
        raise ValueError(f"a win rate of {win_rate} cannot be where {ties} of all ratings are ties")
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    weights /= weights.sum()
    return float(brentq(lambda mean: float(weights @ special.expit(mean + spread * nodes)) - decided, -50.0, 50.0))


def too_few_raters(raters: int) -> str | None:
    """Return the warning for an interval from this few raters; None if they are enough."""
    if raters >= FEWEST_RATERS:
        return None
    return (
        f"{raters} rater{'s are' if raters != 1 else ' is'} too few to tell how far people differ: "
        f"the interval is wide, and may still be too narrow. Have {FEWEST_RATERS} or more people rate."
    )


def smallest_found(
    items: int, raters: int, per_item: int, ties: float = 0.15, rater_spread: float = 0.3, chance: float = 0.8,
    draws: int = 500,
) -> float | None:  # fmt: skip
    """Return the smallest win rate, in steps of 0.01, whose `power` is at least `chance`; None if none has it.

    Win rates up to 1 - ties / 2 are possible. Power rises with the win rate, so bisection finds the smallest.
    """

    def is_enough(percent: int) -> bool:
        return power(items, raters, per_item, percent / 100, ties, rater_spread=rater_spread, draws=draws) >= chance

    rates = range(51, math.ceil(100 * (1 - ties / 2)))
    place = bisect.bisect_left(rates, True, key=is_enough)
    return None if place == len(rates) else rates[place] / 100
