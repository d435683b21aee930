"""A bound on a mean that holds whenever one looks: for who counts while the answers still come in. numpy only."""

import math

import numpy as np
from numpy.typing import ArrayLike

from components.stats.intervals import FloatArray

_GRID = np.linspace(0.0, 1.0, 1001)
_MOST = 0.75
"""The largest share of the capital that a bet may lose."""


def always_valid_low(values: ArrayLike, alpha: float = 0.025) -> FloatArray:
    """Lower bounds (n,) of the mean of independent `values` (n,) in [0, 1], after each: all hold at once.

    With probability 1 - `alpha` no bound of the whole sequence is above the mean, so one may look after each value and
    stop at will. For each m a gambler bets that the mean is above m: its capital after t values is

        K_t(m) = prod_s (1 + min(b_s, c / m) (x_s - m)),  c = 3/4,
        b_t = sqrt(2 log(1 / alpha) / (v_{t-1} t log(1 + t))),  v_t = (1/4 + sum_s (x_s - mean_s)^2) / (t + 1),

    a supermartingale wherever the mean is m or less, so that it ever reaches 1 / alpha has probability alpha at most
    (Ville); the bound is the largest m that all below have been ruled out (Waudby-Smith and Ramdas 2024, JRSS B 86:1,
    equations 24 to 26 and theorem 3). Bounds are multiples of 0.001, rounded down.

    Raises:
        ValueError: a value outside [0, 1], or alpha outside (0, 1).
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or not np.isfinite(x).all() or (x.size and (x.min() < 0 or x.max() > 1)):
        raise ValueError("a bound on a mean needs a list of values between 0 and 1")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}")
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
