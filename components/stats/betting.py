"""Confidence bounds on a mean that hold at every sample size at once, so that one may look while answers come in."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from components.stats.intervals import FloatArray

_GRID = np.linspace(0.0, 1.0, 1001)
FEWEST_OF_PEOPLE = 3
"""The fewest raters that give a bound for all people. Two may agree by chance, which says little about others."""
_MOST = 0.75
"""The largest share of the capital that a bet may lose."""


def always_valid_low(values: ArrayLike, alpha: float = 0.025) -> FloatArray:
    """Return lower bounds (n,) of the mean of independent `values` (n,) in [0, 1], one after each value.

    With probability 1 - `alpha` all bounds of the sequence hold at once, so one may look after each value and stop at
    any time. For each m a gambler bets that the mean is above m. The gambler's capital after t values is

        K_t(m) = prod_s (1 + min(b_s, c / m) (x_s - m)),  c = 3/4,
        b_t = sqrt(2 log(1 / alpha) / (v_{t-1} t log(1 + t))),  v_t = (1/4 + sum_s (x_s - mean_s)^2) / (t + 1),

    a supermartingale wherever the mean is m or less, so that it ever reaches 1 / alpha has probability alpha at most
    (Ville); the bound is the largest m such that all smaller values have been ruled out (Waudby-Smith and Ramdas 2024,
    JRSS B 86:1, theorem 3: the upward half of their hedged capital, with predictable plug-in bets). Bounds are
    multiples of 0.001, rounded down.

    Raises:
        ValueError: a value outside [0, 1].
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not np.isfinite(x).all() or (x.size and (x.min() < 0 or x.max() > 1)):
        raise ValueError("a bound on a mean needs a list of values between 0 and 1")
    times = np.arange(1, x.size + 1)
    means = (0.5 + np.cumsum(x)) / (times + 1)
    variances = (0.25 + np.cumsum(np.square(x - means))) / (times + 1)
    before = np.concatenate([[0.25], variances[:-1]])
    bets = np.sqrt(2 * math.log(1 / alpha) / (before * times * np.log1p(times)))
    bets = np.minimum(bets[:, None], _MOST / np.maximum(_GRID, 1e-9))
    capital = np.cumsum(np.log1p(bets * (x[:, None] - _GRID)), axis=0)
    refuted = np.logical_or.accumulate(capital >= math.log(1 / alpha), axis=0)
    first = np.where(refuted.all(axis=1), _GRID.size - 1, np.argmin(refuted, axis=1))
    return _GRID[np.maximum(first - 1, 0)]


def always_valid_low_of_people(ratings: ArrayLike, alpha: float = 0.025) -> FloatArray:
    """Lower bounds (n,) of the mean rating of all people, from the `ratings` (n, raters) of some; NaN where none.

    `always_valid_low` holds only for the raters who took part: even if all people together prefer neither policy, a few
    of them may prefer one. So half of `alpha` goes to that bound of the items' means, and half to the difference
    between these raters and all people, for which t_{1 - alpha/2, k - 1} s_t / sqrt(k) is subtracted; s_t is the
    standard deviation of the means of the k raters of the first t items. This margin comes from Student's t for a fixed
    t, not from a supermartingale, so `python -m tests.bench.statistics.raters --part looks` measures how often any look
    errs. The bound is 0 until 3 raters have rated.

    Raises:
        ValueError: an item without a rating, or as for `always_valid_low`.
    """
    x = np.asarray(ratings, dtype=np.float64)
    if x.ndim != 2 or np.isnan(x).all(axis=1).any():
        raise ValueError("a bound needs a row of ratings for each item, and a rating in each row")
    low = always_valid_low(np.nanmean(x, axis=1) if x.size else [], alpha / 2)
    counts = np.cumsum(~np.isnan(x), axis=0)
    means = np.where(counts, np.cumsum(np.nan_to_num(x), axis=0) / np.maximum(counts, 1), np.nan)
    raters = (counts > 0).sum(axis=1)
    enough = raters >= FEWEST_OF_PEOPLE
    bounds = np.zeros(len(x))
    spread = np.nanstd(means[enough], axis=1, ddof=1)
    margin = stdtrit(raters[enough] - 1, 1 - alpha / 2) * spread / np.sqrt(raters[enough])
    bounds[enough] = np.maximum(low[enough] - margin, 0.0)
    return bounds
