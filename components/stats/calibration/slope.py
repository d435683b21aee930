"""The recalibration slope: the factor by which to multiply the logits. Needs numpy and scipy only."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit

from components.stats.intervals import FloatArray, cluster_codes, clustered_mean

SLOPE_CAP = 100.0
"""The slope reported where the estimate is infinite: the model is right on every test pair (or wrong on every one)."""


class Slope(NamedTuple):
    """A recalibration slope and its interval. The interval is unknown if the slope is infinite (`capped`)."""

    slope: float
    low: float | None = None
    high: float | None = None
    capped: bool = False


def recalibration_slope(margins: ArrayLike, clusters: Iterable[Hashable]) -> Slope:
    """Return the slope b of the logistic regression, without intercept, of the outcome on the logit d: 1 if calibrated.

    A pair in either order, (d, 1) or (-d, 0), has the same likelihood, so b solves sum d sigmoid(-b d) = 0, whose left
    side falls in b. Below 1 is overconfident. Where every d >= 0 (or every d <= 0) no finite b is best: the slope is
    `SLOPE_CAP` (or -`SLOPE_CAP`) and `capped` is true. Where every d is 0 the slope is NaN. `low` and `high` are the
    sandwich interval over prompts (None where capped).
    """
    d = np.asarray(margins, dtype=np.float64)
    codes = cluster_codes(clusters)
    if not d.any():
        return Slope(float("nan"))
    slope = slope_where(np.abs(d), float(-d[d < 0].sum()))
    if abs(slope) >= SLOPE_CAP:
        return Slope(slope, capped=True)
    information = (np.square(d) * expit(slope * d) * expit(-slope * d)).mean()
    # The influence of each pair on b is one Newton step. The influences' mean is 0, their clustered error is b's.
    spread = clustered_mean(d * expit(-slope * d) / information, codes)
    half = spread.high - spread.value
    return Slope(slope, slope - half, slope + half) if np.isfinite(half) else Slope(slope)


def slope_where(size: FloatArray, wrong: float) -> float:
    """Return the b within +-`SLOPE_CAP` that solves sum |d| sigmoid(-b |d|) = `wrong`, where `size` (n,) is |d|.

    If `wrong` is the sum of |d| over the pairs on which the model is wrong, this is `recalibration_slope`'s equation.
    """

    def score(b: float) -> float:
        return float((size * expit(-b * size)).sum()) - wrong

    if score(SLOPE_CAP) >= 0:
        return SLOPE_CAP
    if score(-SLOPE_CAP) <= 0:
        return -SLOPE_CAP
    return float(brentq(score, -SLOPE_CAP, SLOPE_CAP, xtol=1e-12))
