"""Intervals for autocorrelated series, such as metrics during training. Needs numpy and scipy only."""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from components.stats.intervals import LEVEL, Interval


def series_mean(values: ArrayLike, level: float = LEVEL) -> Interval:
    """Return the mean of a series (n,) with an interval that allows for autocorrelation as `series_rise` does."""
    y = np.asarray(values, dtype=np.float64)
    return _coefficient(y, np.ones((y.size, 1)), 1.0, level)


def series_rise(values: ArrayLike, level: float = LEVEL, *, covariate: ArrayLike | None = None) -> Interval:
    """Return how far the least-squares line through a series (n,) rises from its first value to its last.

    With `covariate`, another series (n,), the regression also includes it: the rise is that at equal `covariate`.

    Errors are assumed AR(1) with lag-1 autocorrelation r, so n values are worth n_e = n (1 - r) / (1 + r), and with k
    regressors the variance of the slope b is s² / Σ (t - mean t)², s² = Σ e² / (n_e - k), judged by Student's t with
    n_e - k degrees of freedom, at least 1/2 (Santer et al. 2000, J. Geophys. Res. 105:7337: their test with adjusted
    standard error and adjusted degrees of freedom). In a short series the residuals underestimate r, so r is raised by
    (k + (2 + k) r) / n (Marriott and Pope 1954, Biometrika 41:390, and Kendall, 41:403) and clipped to [0, 0.95].

    In short series with strong autocorrelation the interval is still too narrow. It misses a true rise of 0 in 4 to 7 %
    of series of 40 values at autocorrelations up to 0.8, but in 12 % of 10 values at 0.6 and in 17 % at 0.8.

    Raises:
        ValueError: fewer than 5 values, or one that is not finite; `covariate` differs in length, or is constant.
    """
    y = np.asarray(values, dtype=np.float64)
    time = np.arange(y.size) - (y.size - 1) / 2
    regressors = [np.ones(y.size)]
    if covariate is not None:
        other = np.asarray(covariate, dtype=np.float64)
        if other.shape != y.shape or not np.isfinite(other).all() or np.ptp(other) == 0:
            raise ValueError("the other series needs as many values, all finite, and not all equal")
        other = other - other.mean()
        regressors.append(other)
        time = time - other * float(other @ time) / float(other @ other)  # Frisch-Waugh: the slope stays that of both
    return _coefficient(y, np.column_stack([*regressors, time]), y.size - 1.0, level)


def _coefficient(y: np.ndarray, regressors: np.ndarray, times: float, level: float) -> Interval:
    """Return `times` x the last least-squares coefficient, with its interval; `regressors` (n, k) are orthogonal."""
    n, k = regressors.shape
    if y.shape != (n,) or n < 5 or not np.isfinite(y).all():
        raise ValueError("the interval of a series needs at least 5 values, all finite")
    coefficients, *_ = np.linalg.lstsq(regressors, y, rcond=None)
    errors, value = y - regressors @ coefficients, times * float(coefficients[-1])
    squares = float(errors @ errors)
    if squares <= 1e-24 * float(y @ y):
        return Interval(value, value, value)
    r = float(errors[1:] @ errors[:-1]) / squares
    r = min(max(r + (k + (2 + k) * r) / n, 0.0), 0.95)
    effective = n * (1 - r) / (1 + r)
    error = math.sqrt(squares / max(effective - k, 0.5) / float(regressors[:, -1] @ regressors[:, -1]))
    half = abs(times) * error * float(stats.t.ppf((1 + level) / 2, max(effective - k, 0.5)))
    return Interval(value, value - half, value + half)
