"""The recalibration slope: by which factor the logits should be multiplied. numpy and scipy only."""

from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq
from scipy.special import expit

from components.stats.intervals import FloatArray, cluster_codes, clustered_mean

SLOPE_CAP = 100.0
"""The slope reported where none is finite: every test pair right (or every one wrong)."""


class Slope(NamedTuple):
    """A recalibration slope and its interval, which is unknown where the slope is not finite (`capped`)."""

    slope: float
    low: float | None = None
    high: float | None = None
    capped: bool = False


class SlopeNull(NamedTuple):
    """The ends between which 95 % of a perfect model's slopes lie; None where they are unknown."""

    low: float | None = None
    high: float | None = None


def recalibration_slope(margins: ArrayLike, clusters: Iterable[Hashable]) -> Slope:
    """Slope b of the logistic regression, without intercept, of the outcome on the logit d: 1 if calibrated.

    Each pair in both orders, (d, 1) and (-d, 0), has the same likelihood twice, so b solves sum d sigmoid(-b d) = 0, a
    falling function of b. Below 1 is overconfident. Where every d >= 0 (or <= 0) no finite b is best: `SLOPE_CAP` with
    its sign is given and `capped` is true. Where every d is 0 the slope is NaN. `low` and `high` are the sandwich
    interval over prompts (None where capped).
    """
    d = np.asarray(margins, dtype=np.float64)
    codes = cluster_codes(clusters)
    if not d.any():
        return Slope(float("nan"))
    slope = slope_where(np.abs(d), float(-d[d < 0].sum()))
    if abs(slope) >= SLOPE_CAP:
        return Slope(slope, capped=True)
    information = (np.square(d) * expit(slope * d) * expit(-slope * d)).mean()
    # One Newton step a pair: its influence on b. Their mean is 0, their clustered spread is b's.
    spread = clustered_mean(d * expit(-slope * d) / information, codes)
    half = spread.high - spread.value
    return Slope(slope, slope - half, slope + half) if np.isfinite(half) else Slope(slope)


def slope_where(size: FloatArray, wrong: float) -> float:
    """The b that solves sum |d| sigmoid(-b |d|) = `wrong`, where `size` (n,) is |d|, within +-`SLOPE_CAP`.

    With `wrong` the sum of |d| over the pairs that the model has wrong, that is the equation of `recalibration_slope`.
    """

    def score(b: float) -> float:
        return float((size * expit(-b * size)).sum()) - wrong

    if score(SLOPE_CAP) >= 0:
        return SLOPE_CAP
    if score(-SLOPE_CAP) <= 0:
        return -SLOPE_CAP
    return float(brentq(score, -SLOPE_CAP, SLOPE_CAP, xtol=1e-12))
