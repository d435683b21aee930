"""Estimate models' strengths from comparisons of two at a time: Bradley-Terry with Davidson's ties."""

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.optimize import minimize
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from components.stats.intervals import LEVEL, FloatArray, Interval, cluster_codes

ENOUGH = 0.9
"""The smallest share of bootstrap draws with an estimate for which an interval is given."""


class PairedScore(NamedTuple):
    """One judgement of two models, which are numbered from 0."""

    first: int
    second: int
    score: float
    """1 if the first is better, 0 if the second is, 0.5 for a tie."""


class Strengths(NamedTuple):
    """Models' strengths in logits relative to a baseline model."""

    strength: list[Interval]
    """log(pi_i / pi_baseline) of each model i; 0 for the baseline. Ends are NaN where too few resamples have one."""
    tie: Interval
    """Davidson's nu: two equal models tie with probability nu / (2 + nu). 0 where nobody tied."""
    log_likelihood: float


class Inseparable(ValueError):
    """The strengths have no finite estimate. The message says why; `better` and `worse` hold the models' numbers."""

    def __init__(self, message: str, better: list[int], worse: list[int]) -> None:
        super().__init__(message)
        self.better, self.worse = better, worse


def tallies(comparisons: Sequence[PairedScore], models: int) -> FloatArray:
    """Count wins and ties, (models, models, 2): how often i was better than j, and (symmetric) how often they tied."""
    return _weighted(*_arrays(comparisons), np.ones(len(comparisons)), models)


def davidson(table: FloatArray, start: FloatArray | None = None) -> tuple[FloatArray, float, float]:
    """Fit log-strengths (k,) of mean 0 and the tie parameter nu to `tallies` (k, k, 2). Also return the log-likelihood.

    Davidson 1970 (JASA 65:317): of models i and j with strengths pi = exp(s),

        P(i better) = pi_i / D,  P(tie) = nu sqrt(pi_i pi_j) / D,  D = pi_i + pi_j + nu sqrt(pi_i pi_j).

    Divided by sqrt(pi_i pi_j) these are a softmax of (d/2, -d/2, log nu) with d = s_i - s_j, so that the log-likelihood
    is concave in s and log nu. Without ties nu is 0, and this is Bradley and Terry's model (1952, Biometrika 39:324).

    Raises:
        Inseparable: some group of models never lost a point to the others, or never met them; or all comparisons are
            ties.
    """
    k, wins, ties = len(table), table[..., 0], np.triu(table[..., 1])
    check_separable(table)
    tied, met = bool(ties.any()), wins + ties  # each once: a win in its winner's row, a tie in the smaller number's
    if tied and not wins.any():
        raise Inseparable("every comparison is a tie, so that the tie parameter is infinite", [], [])

    def loss(values: FloatArray) -> tuple[float, FloatArray]:
        s, log_nu = values[:k], values[k] if tied else -np.inf
        half = (s[:, None] - s[None, :]) / 2
        logs = np.stack([half, -half, np.full((k, k), log_nu)])
        total = special.logsumexp(logs, axis=0)
        value = float((met * total).sum() - (wins * half).sum() - (ties.sum() * log_nu if tied else 0.0))
        share = np.exp(logs - total)
        slope = met * (share[0] - share[1]) / 2 - wins / 2
        gradient = slope.sum(axis=1) - slope.sum(axis=0)
        return value, np.append(gradient, (met * share[2]).sum() - ties.sum()) if tied else gradient

    begin = np.zeros(k + tied) if start is None else start[: k + tied]
    fit = minimize(loss, begin, jac=True, method="BFGS", options={"gtol": 1e-9 * max(1.0, float(met.sum()))})
    strengths = fit.x[:k] - fit.x[:k].mean()
    return strengths, math.exp(fit.x[k]) if tied else 0.0, -float(fit.fun)


def check_separable(table: FloatArray) -> None:
    """Raise `Inseparable` unless a chain of points won (wins or ties) leads from each model to every other.

    Ford 1957 (American Mathematical Monthly 64:28); a tie is half a point for both, which keeps the estimate finite
    (Davidson 1970).
    """
    points = table[..., 0] + table[..., 1]
    groups, of = connected_components(coo_array(points), directed=True, connection="strong")
    if groups == 1:
        return
    met, together = connected_components(coo_array(points), directed=False)
    if met > 1:
        one = [int(i) for i in np.flatnonzero(together == together[0])]
        rest = [int(i) for i in np.flatnonzero(together != together[0])]
        raise Inseparable("no comparison joins these models, so that their strengths have no common scale", one, rest)
    for group in range(groups):  # some group never lost a point to those outside it
        inside = of == group
        if not points[np.ix_(~inside, inside)].any():
            better, worse = ([int(i) for i in np.flatnonzero(mask)] for mask in (inside, ~inside))
            raise Inseparable("one side won every comparison, so that its strength has no upper end", better, worse)


def strengths(
    comparisons: Sequence[PairedScore],
    models: int,
    clusters: Iterable[Hashable],
    raters: Iterable[Hashable] | None = None,
    baseline: int = 0,
    level: float = LEVEL,
    draws: int = 400,
    seed: int = 0,
) -> Strengths:
    """Fit `davidson` relative to a baseline, with percentile intervals by bootstrap over prompts (and raters).

    A draw resamples the clusters with replacement, and the raters too. The weight of a comparison is how often its
    cluster was drawn times how often its rater was (the pigeonhole bootstrap; Owen 2007, Annals of Applied Statistics
    1:386). Draws without a finite estimate (a model won or lost everything) are left out. If they are more than
    1 - `ENOUGH` of all, the ends are NaN.

    Args:
        clusters: (n,) the prompt of each comparison.
        raters: (n,) the rater of each comparison; None resamples prompts alone.

    Raises:
        Inseparable: as for `davidson`.
    """
    first, second, kind = _arrays(comparisons)
    cluster = cluster_codes(clusters)
    rater = None if raters is None else cluster_codes(raters)
    values, nu, likelihood = davidson(tallies(comparisons, models))
    start = np.append(values, math.log(nu) if nu else 0.0)
    random = np.random.default_rng(seed)
    estimates: list[FloatArray] = []
    for _ in range(draws):
        weights = _times_drawn(random, cluster)
        if rater is not None:
            weights = weights * _times_drawn(random, rater)
        try:
            drawn, drawn_nu, _ = davidson(_weighted(first, second, kind, weights, models), start)
        except Inseparable:
            continue
        estimates.append(np.append(drawn - drawn[baseline], drawn_nu))
    ends = np.full((2, models + 1), np.nan)
    if len(estimates) >= ENOUGH * draws:
        ends = np.quantile(np.array(estimates), [(1 - level) / 2, (1 + level) / 2], axis=0)
    estimate = np.append(values - values[baseline], nu)
    intervals = [Interval(float(v), float(low), float(high)) for v, low, high in zip(estimate, *ends, strict=True)]
    intervals[baseline] = Interval(0.0, 0.0, 0.0)
    return Strengths(intervals[:models], intervals[models], likelihood)


def _times_drawn(random: np.random.Generator, codes: NDArray[np.int64]) -> FloatArray:
    """Draw as many groups as there are, with replacement; return how often each row's group was drawn."""
    groups = int(codes.max()) + 1
    return random.multinomial(groups, np.full(groups, 1 / groups))[codes].astype(np.float64)


def _arrays(
    comparisons: Sequence[PairedScore],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return winner, loser and whether they tied (0, 1), each (n,). In a tie the smaller number counts as winner."""
    if not comparisons:
        raise ValueError("no comparisons")
    rows = np.array([(c.first, c.second) if c.score >= 0.5 else (c.second, c.first) for c in comparisons])
    kind = np.array([int(c.score == 0.5) for c in comparisons])
    return rows[:, 0], rows[:, 1], kind


def _weighted(
    first: NDArray[np.int64], second: NDArray[np.int64], kind: NDArray[np.int64], weights: FloatArray, models: int
) -> FloatArray:
    """`tallies` of comparisons that count `weights` (n,)."""
    cell = (first * models + second) * 2 + kind
    counted = np.bincount(cell, weights=weights, minlength=models * models * 2)
    table: FloatArray = counted.astype(np.float64).reshape(models, models, 2)
    table[..., 1] += table[..., 1].T
    return table
