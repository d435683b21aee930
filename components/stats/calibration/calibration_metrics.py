"""Measure the calibration of a reward model. Needs numpy and scipy only.

The one input is the margin d = score(chosen) - score(rejected) of each pair, in logits: the model says the chosen
response wins with probability sigmoid(d / T). The target is the majority's label. Every pair has its chosen response
first, so its label is always 1, and comparing p with 1 would make a perfect model look bad. So everything here ignores
the order: the confidence is max(p, 1 - p) = sigmoid(|d| / T), and the model is right where d > 0 (a tie counts 1/2).
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize_scalar
from scipy.special import expit
from scipy.stats import rankdata

from components.stats.calibration.nulls import Integers, Judgements, cells_of, ece_nulls, slope_null
from components.stats.calibration.slope import recalibration_slope
from components.stats.intervals import (
    LEVEL,
    FloatArray,
    Interval,
    Numbers,
    cluster_codes,
    clustered_mean,
    clustered_proportion,
)

TARGET = "majority label"
TEMPERATURE_RANGE = (1e-2, 1e2)
"""Range in which the temperature is fitted. A fit at an end means that the pairs determine no temperature: the model
is right on all of them, or no better than chance."""
_CHUNK_CELLS = 2_000_000


class ConfidenceBin(TypedDict):
    """A bin of pairs with similar confidence: its mean confidence, accuracy with interval, and number of pairs."""

    confidence: float
    accuracy: float
    n: int
    low: float
    high: float


class Calibration(NamedTuple):
    """What `calibration` measures."""

    numbers: Numbers
    bins: dict[str, list[ConfidenceBin]]
    """The bins of the reliability plot, ordered by confidence: `bins` (equal mass) and `bins_width` (equal width)."""

    def document(self) -> dict[str, object]:
        """As one JSON object."""
        return {"target": TARGET, **self.numbers, **self.bins}


def fit_temperature(margins: ArrayLike) -> float:
    """Return the maximum-likelihood temperature T of sigmoid(d / T), for the margins d (n,) of calibration pairs.

    Guo et al. 2017, section 4.2, for a Bradley-Terry model. The negative log likelihood, mean log(1 + exp(-d / T)), is
    convex in 1 / T and so has one minimum in log T, which is searched for within `TEMPERATURE_RANGE`.

    Raises:
        ValueError: no margins, or one that is not finite.
    """
    d = _margins(margins)
    low, high = np.log(TEMPERATURE_RANGE)
    fit = minimize_scalar(lambda t: log_loss(d, float(np.exp(t))), bounds=(low, high), method="bounded",
                            options={"xatol": 1e-9})  # fmt: skip
    return float(np.exp(fit.x))


def temperature_at_end(temperature: float) -> bool:
    """Return whether a fit ended at an end of `TEMPERATURE_RANGE`: the calibration pairs determine no temperature."""
    low, high = TEMPERATURE_RANGE
    return temperature < low * 1.001 or temperature > high / 1.001


def log_loss(margins: ArrayLike, temperature: float) -> float:
    """Mean of -log sigmoid(d / T), in nats a pair."""
    return float(np.logaddexp(0.0, -np.asarray(margins, dtype=np.float64) / temperature).mean())


def correctness(margins: ArrayLike) -> FloatArray:
    """1 where the chosen response scores higher, 0 where lower, a half for a tie; shape (n,)."""
    return (np.sign(np.asarray(margins, dtype=np.float64)) + 1) / 2


def equal_mass_bins(confidence: FloatArray, bins: int) -> Integers:
    """Assign each confidence (n,) to a bin 0..bins-1, with n / bins pairs each. Equal confidences share a bin.

    Ties get their mean rank, so the order of the rows does not matter; a bin may stay empty.
    """
    place = (rankdata(confidence, method="average") - 0.5) / confidence.size
    return np.minimum((place * bins).astype(np.int64), bins - 1)


def equal_width_bins(confidence: FloatArray, bins: int) -> Integers:
    """Assign each confidence (n,) to one of the bins 0..bins-1, of equal width in [0.5, 1]; bins may stay empty."""
    return np.minimum(((confidence - 0.5) * 2 * bins).astype(np.int64), bins - 1)


def expected_calibration_error(confidence: FloatArray, correct: FloatArray, bin_of: Integers) -> float:
    """ECE = sum over bins of n_bin / n * |mean confidence - mean correctness|, all inputs (n,)."""
    return float(np.abs(np.bincount(bin_of, weights=confidence - correct)).sum() / confidence.size)


def ece_interval(
    confidence: FloatArray, correct: FloatArray, bin_of: Integers, codes: Integers, seed: int, draws: int
) -> tuple[float, float]:
    """Percentile interval of ECE from resampling prompts (`codes` (n,), 0..C-1) with the bins held fixed.

    ECE sums absolute values, so the noise that resampling adds only increases it. The interval is therefore biased
    upwards; read it beside the null.
    """
    groups, bins = int(codes.max()) + 1, int(bin_of.max()) + 1
    gaps = np.bincount(codes * bins + bin_of, weights=confidence - correct, minlength=groups * bins)
    gaps = gaps.reshape(groups, bins)
    sizes = np.bincount(codes, minlength=groups).astype(np.float64)
    rng = np.random.default_rng([seed, 0xB007])
    resampled = []
    step = max(1, _CHUNK_CELLS // groups)
    for begin in range(0, draws, step):
        drawn = rng.multinomial(groups, np.full(groups, 1 / groups), size=min(step, draws - begin))
        weights = drawn.astype(np.float64)
        resampled.append(np.abs(weights @ gaps).sum(axis=1) / (weights @ sizes))
    low, high = np.quantile(np.concatenate(resampled), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def calibration(
    margins: ArrayLike, clusters: Sequence[Hashable], temperature: float, seed: int, bins: int = 10, draws: int = 1000,
    judgements: Judgements | None = None,
) -> Calibration:  # fmt: skip
    """Measure calibration on test pairs: margins (n,), their prompts (n,), and a temperature fitted on other pairs.

    `judgements` say which pairs were judged together, for the nulls; without them every pair was judged by itself.

    Numbers: `pairs`, `prompts`, `level`, `temperature`, `temperature_at_end`; `accuracy`; after temperature
    `ece` (equal-mass bins) and `ece_width` (equal-width bins), each with `_null_95`, the 95th percentile of its null;
    `calibration_slope` with `slope_low`, `slope_high` (None where capped), `slope_capped` and the ends of its null,
    `slope_null_low` and `slope_null_high`; `brier`, `log_loss`; at T = 1 `ece_before`, `ece_width_before`,
    `brier_before`, `log_loss_before`. `accuracy`, the ECEs after temperature, the Brier scores and the log losses also
    have `_low` and `_high`. A null is None where it is unknown. The document is valid JSON, except that the slope is
    NaN where all margins are 0.

    Raises:
        ValueError: no margins, one that is not finite, or a different number of clusters.
    """
    d = _margins(margins)
    codes = cluster_codes(clusters)
    right = correctness(d)
    confidence, before = expit(np.abs(d) / temperature), expit(np.abs(d))
    by_mass, by_width = equal_mass_bins(confidence, bins), equal_width_bins(confidence, bins)
    slope = recalibration_slope(d / temperature, codes)
    judgements = judgements or Judgements.alone(codes)
    everything = np.ones(d.size, dtype=np.bool_)
    cells = cells_of([everything, everything], [by_mass, by_width], bins)
    nulls = ece_nulls(d / temperature, judgements, cells, np.array([d.size, d.size]), seed, draws)
    slope_null_low, slope_null_high = slope_null(d / temperature, judgements, nulls.wrong)
    numbers: Numbers = {
        "pairs": int(d.size),
        "prompts": int(codes.max()) + 1,
        "level": LEVEL,
        "temperature": temperature,
        "temperature_at_end": temperature_at_end(temperature),
        "calibration_slope": slope.slope,
        "slope_low": slope.low,
        "slope_high": slope.high,
        "slope_capped": slope.capped,
        "slope_null_low": slope_null_low,
        "slope_null_high": slope_null_high,
        "ece_before": expected_calibration_error(before, right, equal_mass_bins(before, bins)),
        "ece_width_before": expected_calibration_error(before, right, equal_width_bins(before, bins)),
    }
    for (name, bin_of), null in zip((("ece", by_mass), ("ece_width", by_width)), nulls.quantile(0.95), strict=True):
        ends = ece_interval(confidence, right, bin_of, codes, seed, draws)
        numbers |= Interval(expected_calibration_error(confidence, right, bin_of), *ends).named(name)
        numbers[f"{name}_null_95"] = float(null) if np.isfinite(null) else None
    numbers |= clustered_proportion(right, codes).named("accuracy")
    for suffix, t in (("", temperature), ("_before", 1.0)):
        numbers |= clustered_mean(np.square(expit(-d / t)), codes).named(f"brier{suffix}")
        numbers |= clustered_mean(np.logaddexp(0.0, -d / t), codes).named(f"log_loss{suffix}")
    bins_of = {"bins": by_mass, "bins_width": by_width}
    return Calibration(numbers, {n: reliability(confidence, right, b, codes) for n, b in bins_of.items()})


def _margins(margins: ArrayLike) -> FloatArray:
    d = np.asarray(margins, dtype=np.float64)
    if d.ndim != 1 or d.size == 0 or not np.isfinite(d).all():
        raise ValueError("calibration needs a non-empty list of finite margins")
    return d


def reliability(confidence: FloatArray, correct: FloatArray, bin_of: Integers, codes: Integers) -> list[ConfidenceBin]:
    """Return the mean confidence and the accuracy, with its interval, of each bin that has pairs; all inputs (n,)."""
    rows: list[ConfidenceBin] = []
    for index in np.unique(bin_of):
        inside = bin_of == index
        value, low, high = clustered_proportion(correct[inside], codes[inside])
        mean, n = float(confidence[inside].mean()), int(inside.sum())
        rows.append({"confidence": mean, "accuracy": value, "n": n, "low": low, "high": high})
    return rows
