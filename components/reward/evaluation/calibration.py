"""How far a reward model's confidence may be believed. numpy and scipy only.

The one input is the margin d = score(chosen) - score(rejected) of each pair, in logits: the model says the chosen
response wins with probability sigmoid(d / T). The target is the majority's label. Pairs come with the chosen one first,
so their label is always 1, and comparing p with 1 would make a perfect model look bad; everything here is therefore
invariant to the order: confidence max(p, 1 - p) = sigmoid(|d| / T), and right where d > 0 (a tie counts a half).
"""

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypedDict

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq, minimize_scalar
from scipy.special import expit
from scipy.stats import rankdata

from components.reward.pairs import PreferencePair
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
"""Where the temperature is sought; ending at an end means the pairs name none (all right, or no better than chance)."""
SLOPE_CAP = 100.0
"""The slope reported where none is finite: every test pair right (or every one wrong)."""
_CHUNK_CELLS = 2_000_000

Integers = NDArray[np.int64]


class ConfidenceBin(TypedDict):
    """Pairs of like confidence: mean confidence, accuracy with the ends of its interval, how many they are."""

    confidence: float
    accuracy: float
    n: int
    low: float
    high: float


class Slope(NamedTuple):
    """A recalibration slope and its interval, which is unknown where the slope is not finite (`capped`)."""

    slope: float
    low: float | None = None
    high: float | None = None
    capped: bool = False


class Calibration(NamedTuple):
    """What `calibration` measures."""

    numbers: Numbers
    bins: dict[str, list[ConfidenceBin]]
    """`bins` and `bins_width`, for the plot, rising in confidence."""

    def document(self) -> dict[str, object]:
        """As one JSON object."""
        return {"target": TARGET, **self.numbers, **self.bins}


def fit_temperature(margins: ArrayLike) -> float:
    """The temperature T of greatest likelihood of sigmoid(d / T), d the margins (n,) of calibration pairs.

    Guo et al. 2017, section 4.2, for a Bradley-Terry model. The negative log likelihood, mean log(1 + exp(-d / T)), is
    convex in 1 / T and so has one minimum in log T, sought within `TEMPERATURE_RANGE`.

    Raises:
        ValueError: no margins, or one that is not finite.
    """
    d = _margins(margins)
    low, high = np.log(TEMPERATURE_RANGE)
    found = minimize_scalar(lambda t: log_loss(d, float(np.exp(t))), bounds=(low, high), method="bounded",
                            options={"xatol": 1e-9})  # fmt: skip
    return float(np.exp(found.x))


def temperature_at_end(temperature: float) -> bool:
    """Whether the fit ran into an end of `TEMPERATURE_RANGE`: the calibration pairs name no temperature."""
    low, high = TEMPERATURE_RANGE
    return temperature < low * 1.001 or temperature > high / 1.001


def log_loss(margins: ArrayLike, temperature: float) -> float:
    """Mean of -log sigmoid(d / T), in nats a pair."""
    return float(np.logaddexp(0.0, -np.asarray(margins, dtype=np.float64) / temperature).mean())


def correctness(margins: ArrayLike) -> FloatArray:
    """1 where the chosen response scores higher, 0 where lower, a half for a tie; shape (n,)."""
    return (np.sign(np.asarray(margins, dtype=np.float64)) + 1) / 2


def equal_mass_bins(confidence: FloatArray, bins: int) -> Integers:
    """A bin 0..bins-1 for each confidence (n,), of n / bins pairs each; equal confidences always share a bin.

    Ties share their mean rank, so the order of the rows changes nothing; a bin may stay empty.
    """
    place = (rankdata(confidence, method="average") - 0.5) / confidence.size
    return np.minimum((place * bins).astype(np.int64), bins - 1)


def equal_width_bins(confidence: FloatArray, bins: int) -> Integers:
    """A bin 0..bins-1 for each confidence (n,), of equal widths between a half and 1; bins may stay empty."""
    return np.minimum(((confidence - 0.5) * 2 * bins).astype(np.int64), bins - 1)


def expected_calibration_error(confidence: FloatArray, correct: FloatArray, bin_of: Integers) -> float:
    """ECE = sum over bins of n_bin / n * |mean confidence - mean correctness|, all inputs (n,)."""
    return float(np.abs(np.bincount(bin_of, weights=confidence - correct)).sum() / confidence.size)


def ece_under_null(
    confidence: FloatArray, tied: NDArray[np.bool_], bin_of: Integers, seed: int, draws: int = 1000
) -> FloatArray:
    """ECE (draws,) of a model whose confidences are true: correctness drawn from them, independently over pairs.

    It is not 0: each bin's mean strays by chance, and ECE adds up its size.
    """
    order = np.argsort(bin_of, kind="stable")
    confidence, tied = confidence[order], tied[order]
    starts = np.flatnonzero(np.diff(bin_of[order], prepend=-1))
    parts = drawn_correctness(confidence, tied, np.random.default_rng([seed, 0x0ECE]), draws)
    found = [np.abs(np.add.reduceat(confidence - drawn, starts, axis=1)).sum(axis=1) for drawn in parts]
    return np.concatenate(found) / confidence.size


def drawn_correctness(
    confidence: FloatArray, tied: NDArray[np.bool_], rng: np.random.Generator, draws: int
) -> Iterator[FloatArray]:
    """Correctness drawn from confidences (n,) that are true, `draws` times: (k, n) at a time, `_CHUNK_CELLS` at most.

    Ties stay a half, as they are counted.
    """
    step = max(1, _CHUNK_CELLS // confidence.size)
    for begin in range(0, draws, step):
        drawn = (rng.random((min(step, draws - begin), confidence.size)) < confidence).astype(np.float64)
        drawn[:, tied] = 0.5
        yield drawn


def ece_interval(
    confidence: FloatArray, correct: FloatArray, bin_of: Integers, codes: Integers, seed: int, draws: int
) -> tuple[float, float]:
    """Percentile interval of ECE from resampling prompts (`codes` (n,), 0..C-1) with the bins held fixed.

    ECE adds absolute values, so resampling can only add to what chance put there: the interval leans high, and it is to
    be read beside the null.
    """
    groups, bins = int(codes.max()) + 1, int(bin_of.max()) + 1
    gaps = np.bincount(codes * bins + bin_of, weights=confidence - correct, minlength=groups * bins)
    gaps = gaps.reshape(groups, bins)
    sizes = np.bincount(codes, minlength=groups).astype(np.float64)
    rng = np.random.default_rng([seed, 0xB007])
    found = []
    step = max(1, _CHUNK_CELLS // groups)
    for begin in range(0, draws, step):
        drawn = rng.multinomial(groups, np.full(groups, 1 / groups), size=min(step, draws - begin))
        weights = drawn.astype(np.float64)
        found.append(np.abs(weights @ gaps).sum(axis=1) / (weights @ sizes))
    low, high = np.quantile(np.concatenate(found), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def recalibration_slope(margins: ArrayLike, clusters: Iterable[Hashable]) -> Slope:
    """Slope b of the logistic regression, without intercept, of the outcome on the logit d: 1 if calibrated.

    Each pair in both orders, (d, 1) and (-d, 0), has the same likelihood twice, so b solves sum d sigmoid(-b d) = 0, a
    falling function of b. Below 1 is overconfident. Where every d >= 0 (or <= 0) no finite b is best: `SLOPE_CAP` with
    its sign is given and `capped` is true. Where every d is 0 the slope is NaN. `low` and `high` are the sandwich
    interval over prompts (None where capped).
    """
    d = _margins(margins)
    codes = cluster_codes(clusters)

    def score(b: float) -> float:
        return float((d * expit(-b * d)).sum())

    if not d.any():
        return Slope(float("nan"))
    if score(SLOPE_CAP) >= 0 or score(-SLOPE_CAP) <= 0:
        return Slope(SLOPE_CAP if score(SLOPE_CAP) >= 0 else -SLOPE_CAP, capped=True)
    slope = float(brentq(score, -SLOPE_CAP, SLOPE_CAP, xtol=1e-12))
    information = (np.square(d) * expit(slope * d) * expit(-slope * d)).mean()
    # One Newton step a pair: its influence on b. Their mean is 0, their clustered spread is b's.
    spread = clustered_mean(d * expit(-slope * d) / information, codes)
    half = spread.high - spread.value
    return Slope(slope, slope - half, slope + half) if np.isfinite(half) else Slope(slope)


def calibration(
    margins: ArrayLike, clusters: Sequence[Hashable], temperature: float, seed: int, bins: int = 10, draws: int = 1000
) -> Calibration:
    """All that is said of calibration on test pairs: margins (n,), their prompts, a temperature fitted elsewhere.

    Numbers: `pairs`, `prompts`, `level`, `temperature`, `temperature_at_end`; `accuracy`; after temperature
    `ece` (equal-mass bins) and `ece_width` (equal-width bins), each with `_null_95`, the 95th percentile of its null,
    `calibration_slope` with `slope_low`, `slope_high` (None where capped) and `slope_capped`, `brier`, `log_loss`; at
    T = 1 `ece_before`, `ece_width_before`, `brier_before`, `log_loss_before`; all but the last two ECEs with `_low`
    and `_high`. The document is JSON-ready except that the slope of all-zero margins is NaN.

    Raises:
        ValueError: no margins, one that is not finite, or another number of clusters.
    """
    d = _margins(margins)
    codes = cluster_codes(clusters)
    right = correctness(d)
    confidence, before = expit(np.abs(d) / temperature), expit(np.abs(d))
    by_mass, by_width = equal_mass_bins(confidence, bins), equal_width_bins(confidence, bins)
    slope = recalibration_slope(d / temperature, codes)
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
        "ece_before": expected_calibration_error(before, right, equal_mass_bins(before, bins)),
        "ece_width_before": expected_calibration_error(before, right, equal_width_bins(before, bins)),
    }
    for name, bin_of in (("ece", by_mass), ("ece_width", by_width)):
        ends = ece_interval(confidence, right, bin_of, codes, seed, draws)
        numbers |= Interval(expected_calibration_error(confidence, right, bin_of), *ends).named(name)
        numbers[f"{name}_null_95"] = float(np.quantile(ece_under_null(confidence, d == 0, bin_of, seed, draws), 0.95))
    numbers |= clustered_proportion(right, codes).named("accuracy")
    for suffix, t in (("", temperature), ("_before", 1.0)):
        numbers |= clustered_mean(np.square(expit(-d / t)), codes).named(f"brier{suffix}")
        numbers |= clustered_mean(np.logaddexp(0.0, -d / t), codes).named(f"log_loss{suffix}")
    bins_of = {"bins": by_mass, "bins_width": by_width}
    return Calibration(numbers, {n: reliability(confidence, right, b, codes) for n, b in bins_of.items()})


def length_baseline(length_gap_train: ArrayLike, length_gap_test: ArrayLike) -> tuple[FloatArray, str]:
    """Correctness (n_test,) of a rule that sees only lengths, and the rule: `longer` or `shorter` wins.

    The gaps are length(chosen) - length(rejected), in characters or tokens; the rule is the one right more often on the
    training pairs (`longer` where neither is). Equal lengths count a half.
    """
    train = np.sign(np.asarray(length_gap_train, dtype=np.float64))
    shorter = train.sum() < 0
    test = correctness(length_gap_test)
    return (1 - test, "shorter") if shorter else (test, "longer")


def chosen_shown_first(rows: Sequence[PreferencePair]) -> NDArray[np.bool_]:
    """An order to show each pair in that knows nothing of the label: by the sha256 of prompt and response. (n,)."""

    def rank(row: PreferencePair, response: str) -> bytes:
        return hashlib.sha256(f"{row['prompt']}\0{response}".encode("utf-8", "surrogatepass")).digest()

    return np.array([rank(row, row["chosen"]) < rank(row, row["rejected"]) for row in rows], dtype=np.bool_)


def majority_baseline(first_train: ArrayLike, first_test: ArrayLike) -> FloatArray:
    """Correctness (n_test,) of always naming the side that won more often in training (`chosen_shown_first`).

    Near a half unless an order leaks into the data, and it is measured, not assumed.
    """
    train, test = np.asarray(first_train, dtype=np.float64), np.asarray(first_test, dtype=np.float64)
    return test if train.size == 0 or train.mean() >= 0.5 else 1 - test


def _margins(margins: ArrayLike) -> FloatArray:
    d = np.asarray(margins, dtype=np.float64)
    if d.ndim != 1 or d.size == 0 or not np.isfinite(d).all():
        raise ValueError("calibration needs a non-empty list of finite margins")
    return d


def reliability(confidence: FloatArray, correct: FloatArray, bin_of: Integers, codes: Integers) -> list[ConfidenceBin]:
    """Mean confidence and accuracy, with its interval, of the pairs of each bin that has any; all inputs (n,)."""
    rows: list[ConfidenceBin] = []
    for index in np.unique(bin_of):
        inside = bin_of == index
        value, low, high = clustered_proportion(correct[inside], codes[inside])
        mean, n = float(confidence[inside].mean()), int(inside.sum())
        rows.append({"confidence": mean, "accuracy": value, "n": n, "low": low, "high": high})
    return rows
