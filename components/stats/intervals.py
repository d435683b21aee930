"""Confidence intervals and agreement measures. Rows of one prompt form one cluster. Needs numpy and scipy only."""

import math
from collections.abc import Hashable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FloatArray = NDArray[np.float64]
Numbers = dict[str, float | None]
"""Maps a measurement's name to its value; None is unknown."""
LEVEL = 0.95
"""Default confidence level of an interval."""


class Interval(NamedTuple):
    """An estimate with the lower and upper ends of its confidence interval."""

    value: float
    low: float
    high: float

    def named(self, name: str) -> Numbers:
        """Return `name`, `name_low` and `name_high` for JSON. A value that is not finite, hence unknown, is None."""
        return {
            key: number if math.isfinite(number) else None
            for key, number in zip((name, f"{name}_low", f"{name}_high"), self, strict=True)
        }

    def metrics(self, name: str) -> dict[str, float]:
        """As `named`, without unknown values. A gate on a missing metric fails."""
        return {key: number for key, number in self.named(name).items() if number is not None}

    @property
    def ends(self) -> list[float] | None:
        """Return both ends for JSON; None where they are unknown."""
        return [self.low, self.high] if math.isfinite(self.low) and math.isfinite(self.high) else None


def cluster_codes(clusters: Iterable[Hashable]) -> NDArray[np.int64]:
    """Number `clusters`, of any hashable type, 0..C-1 in order of first appearance."""
    if isinstance(clusters, np.ndarray) and clusters.ndim == 1:
        _, first, group = np.unique(clusters, return_index=True, return_inverse=True)
        place = np.empty(len(first), np.int64)
        place[np.argsort(first)] = np.arange(len(first))
        return place[group]
    seen: dict[Hashable, int] = {}
    return np.fromiter((seen.setdefault(cluster, len(seen)) for cluster in clusters), dtype=np.int64)


def clustered_mean(values: ArrayLike, clusters: Iterable[Hashable], level: float = LEVEL) -> Interval:
    """Return the mean of `values` (n,) with an interval that allows values of one cluster (a prompt) to be dependent.

    The mean over C clusters is a ratio of sums, y = sum_c Y_c / sum_c n_c; linearised (Cochran, Sampling Techniques,
    3rd ed. 1977, section 6.4, with clusters as units; the same as Liang and Zeger's sandwich, 1986, for an intercept):

        var(y) = C / (C - 1) * sum_c (Y_c - n_c y)^2 / n^2,    ends y -+ t_{C-1} sqrt(var)

    With one cluster the variance is unknown: both ends are NaN, which no gate passes.

    Raises:
        ValueError: no values, a value that is not finite, or a different number of clusters.
    """
    y, codes = _checked(values, clusters)
    mean = float(y.mean())
    error, groups = _standard_error(y, codes, mean)
    if groups < 2:
        return Interval(mean, float("nan"), float("nan"))
    half = t_quantile(level, groups) * error
    return Interval(mean, mean - half, mean + half)


def clustered_ratio(numerators: ArrayLike, denominators: ArrayLike, clusters: Iterable[Hashable]) -> Interval:
    """Return R = sum y / sum x of `numerators` y and `denominators` x, both (n,), with `clustered_mean`'s interval.

    For example KL per token: y is a response's KL, x its tokens. By linearisation (Cochran, Sampling Techniques, 3rd
    ed. 1977, section 6.4) the interval is that of the mean of R + (y - R x) / mean(x).

    Raises:
        ValueError: the two differ in length, or as for `clustered_mean`.
    """
    y, x = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if y.shape != x.shape:
        raise ValueError(f"numerators and denominators differ in shape: {y.shape} and {x.shape}")
    ratio = y.sum() / x.sum()
    return clustered_mean(ratio + (y - ratio * x) / x.mean(), clusters)


def clustered_proportion(values: ArrayLike, clusters: Iterable[Hashable], level: float = LEVEL) -> Interval:
    """Return the mean of `values` (n,) in [0, 1] (an accuracy or win rate, ties 1/2) with an interval inside [0, 1].

    Wilson's interval at the effective sample size p (1 - p) / var(p) with the clustered variance of `clustered_mean`,
    scaled by the t quantile (Dean and Pagano, 2015, J. Survey Stat. Methodol. 3:484, "modified Wilson"). Unlike the t
    interval it has a positive width even if every value is 0 or every value is 1: then each cluster counts as one
    draw. With one cluster the ends are 0 and 1.

    Raises:
        ValueError: as for `clustered_mean`, or a value outside [0, 1].
    """
    y, codes = _checked(values, clusters)
    if y.min() < 0.0 or y.max() > 1.0:
        raise ValueError("a proportion needs values between 0 and 1")
    p = float(y.mean())
    error, groups = _standard_error(y, codes, p)
    return _wilson(p, error, groups, y.size, level)


def paired_gain(a: ArrayLike, b: ArrayLike, clusters: Iterable[Hashable], level: float = LEVEL) -> Interval:
    """Return the mean of a - b, both (n,) and measured on the same rows, with `clustered_mean`'s interval.

    Raises:
        ValueError: `a` and `b` differ in length, or as for `clustered_mean`.
    """
    left, right = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if left.shape != right.shape:
        raise ValueError(f"paired values differ in shape: {left.shape} and {right.shape}")
    return clustered_mean(left - right, clusters, level)


def gain_in_shares(a: ArrayLike, b: ArrayLike, clusters: Iterable[Hashable], level: float = LEVEL) -> Interval:
    """As `paired_gain` for `a` and `b` in [0, 1] (correctness, ties 1/2), but wider if few rows differ.

    Where no row differs, `paired_gain` has an interval of width 0, even for two rows. So the interval is widened to
    what the mean of max(a - b, 0) and that of max(b - a, 0) imply (`at_least_of_shares`): with n equal rows, each of
    its own cluster, the ends are -+ t^2 / (n + t^2).

    Raises:
        ValueError: as for `paired_gain`, or a value outside [0, 1].
    """
    codes = cluster_codes(clusters)
    gain = paired_gain(a, b, codes, level)
    difference = np.asarray(a, dtype=np.float64) - np.asarray(b, dtype=np.float64)
    gained, lost = (clustered_proportion(np.maximum(sign * difference, 0.0), codes, level) for sign in (1, -1))
    return at_least_of_shares(gain, ((1.0, gained), (-1.0, lost)))


def at_least_of_shares(linearised: Interval, shares: Iterable[tuple[float, Interval]]) -> Interval:
    """Widen the interval of a weighted sum of shares, sum_i w_i p_i, to what the shares' own intervals imply.

    With l_i the end of share i that makes the sum smaller, the lower end is at most value - sqrt(sum_i (w_i (p_i -
    l_i))^2), and the upper end at least its mirror image (Zou and Donner 2008, Statistics in Medicine 27:1693; of a
    difference of two shares with Wilson's ends Newcombe 1998, Statistics in Medicine 17:873). A linearised interval
    takes a share of which the sample shows no variation, as that of one row, as exact. NaN ends stay NaN.
    """
    if not math.isfinite(linearised.low):
        return linearised
    value, down, up = linearised.value, 0.0, 0.0
    for weight, share in shares:
        ends = weight * (share.value - share.low), weight * (share.high - share.value)
        down, up = math.hypot(down, ends[weight < 0]), math.hypot(up, ends[weight > 0])
    return Interval(value, min(linearised.low, value - down), max(linearised.high, value + up))


def jackknifed_ratio(a: float, b: float, a_without: ArrayLike, b_without: ArrayLike) -> Interval:
    """Return a / b of two statistics of the same C clusters, with an interval by the jackknife of log a - log b.

    With theta_c = log a - log b computed without cluster c (Efron and Stein 1981, Annals of Statistics 9:586),

        var = (C - 1) / C * sum_c (theta_c - mean theta)^2,    ends a / b * exp(-+ t_{C-1} sqrt(var))

    All three values are NaN where b is not above 0. Where a is 0, both ends are 0. Where a statistic is 0 or undefined
    without some cluster, or there is only one cluster, the ends are NaN.

    Args:
        a_without, b_without: (C,) the statistics without each cluster.

    Raises:
        ValueError: these differ in shape.
    """
    left, right = np.asarray(a_without, dtype=np.float64), np.asarray(b_without, dtype=np.float64)
    if left.shape != right.shape or left.ndim != 1:
        raise ValueError(f"statistics without each cluster differ in shape: {left.shape} and {right.shape}")
    nan = float("nan")
    if not b > 0:
        return Interval(nan, nan, nan)
    if a <= 0:
        return Interval(0.0, 0.0, 0.0)
    if left.size < 2 or not (np.isfinite(left) & np.isfinite(right) & (left > 0) & (right > 0)).all():
        return Interval(a / b, nan, nan)
    spread = float(np.sqrt((left.size - 1) * (np.log(left) - np.log(right)).var()))
    factor = math.exp(t_quantile(LEVEL, left.size) * spread)
    return Interval(a / b, a / b / factor, a / b * factor)


def clustered_auroc(
    positive: ArrayLike,
    negative: ArrayLike,
    positive_clusters: Iterable[Hashable],
    negative_clusters: Iterable[Hashable],
) -> Interval:
    """Return the area under the ROC curve: P(a value of `positive` (n1,) > a value of `negative` (n0,)), ties 1/2.

    The variance comes from the placements: for each value, the share of the other side that is below (or above) it
    (DeLong et al. 1988, Biometrics 44:837), summed by cluster over both sides (Obuchowski 1997, Biometrics 53:567). The
    ends are computed as in `clustered_proportion`, so the interval has a positive width even at perfect separation.

    Raises:
        ValueError: as for `clustered_mean`, for either side.
    """
    clusters1, clusters0 = list(positive_clusters), list(negative_clusters)
    above, below = _checked(positive, clusters1)[0], _checked(negative, clusters0)[0]
    n1, n0 = above.size, below.size
    ranks = stats.rankdata(np.concatenate([above, below]))
    placed1 = (ranks[:n1] - stats.rankdata(above)) / n0
    placed0 = 1 - (ranks[n1:] - stats.rankdata(below)) / n1
    area = float(placed1.mean())
    influence = np.concatenate([(placed1 - area) / n1, (placed0 - area) / n0]) * (n1 + n0)
    error, groups = _standard_error(influence, cluster_codes([*clusters1, *clusters0]), 0.0)
    return _wilson(area, error, groups, min(n1, n0), LEVEL)


def _checked(values: ArrayLike, clusters: Iterable[Hashable]) -> tuple[FloatArray, NDArray[np.int64]]:
    y = np.asarray(values, dtype=np.float64)
    codes = cluster_codes(clusters)
    if y.ndim != 1 or y.size == 0:
        raise ValueError("an interval needs a one-dimensional, non-empty list of values")
    if y.size != codes.size:
        raise ValueError(f"{y.size} values and {codes.size} clusters")
    if not np.isfinite(y).all():
        raise ValueError("an interval of values that are not all finite")
    return y, codes


def _standard_error(y: FloatArray, codes: NDArray[np.int64], mean: float) -> tuple[float, int]:
    groups = int(codes.max()) + 1
    if groups < 2:
        return float("nan"), groups
    residuals = np.bincount(codes, weights=y - mean, minlength=groups)
    return float(np.sqrt(groups / (groups - 1) * np.square(residuals).sum()) / y.size), groups


def _wilson(p: float, error: float, groups: int, size: int, level: float) -> Interval:
    """Wilson's interval of a proportion `p` whose standard error allows for clusters."""
    if groups < 2:
        return Interval(p, 0.0, 1.0)
    # Clusters that agree exactly (all 0.5) show no spread, so they are worth no more draws than they have values.
    draws = groups if p * (1.0 - p) <= 1e-15 else size
    return wilson(p, error**2, groups - 1.0, draws, level)


def wilson(p: float, variance: float, freedom: float, draws: int, level: float) -> Interval:
    """Return Wilson's interval (1927, JASA 22:209) of a share at the effective sample size p (1 - p) / variance.

    Student's t quantile with `freedom` degrees of freedom replaces the normal one. `draws` is the sample size where the
    variance is 0. The interval is [0, 1] where variance or freedom is NaN.
    """
    if math.isnan(variance) or math.isnan(freedom):
        return Interval(p, 0.0, 1.0)
    spread = p * (1.0 - p)
    effective = spread / variance if spread > 1e-15 and variance > 1e-24 else float(draws)
    z2 = float(stats.t.ppf((1 + level) / 2, freedom)) ** 2
    centre = (p + z2 / (2 * effective)) / (1 + z2 / effective)
    half = np.sqrt(z2) / (1 + z2 / effective) * np.sqrt(spread / effective + z2 / (4 * effective**2))
    return Interval(p, min(p, max(0.0, float(centre - half))), max(p, min(1.0, float(centre + half))))


def t_quantile(level: float, groups: int) -> float:
    """Return the half-width of an interval of `level` in standard errors, if `groups` clusters gave the error."""
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, not {level}")
    return float(stats.t.ppf((1 + level) / 2, groups - 1))
