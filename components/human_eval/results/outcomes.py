"""Wins, ties and losses of the policy, and its win rate at equal length of the replies."""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from components.human_eval.returned_labels import Sample
from components.stats.intervals import FloatArray, Interval, cluster_codes

_STEPS, _LONGEST_STEP = 50, 2.0
_DRAWS = 1000


def outcomes(scores: Iterable[float]) -> dict[str, float]:
    """Return numbers and shares of wins (scores above 1/2), ties and losses, of items' mean scores or ratings'."""
    values = list(scores)
    wins, losses = sum(value > 0.5 for value in values), sum(value < 0.5 for value in values)
    ties = len(values) - wins - losses
    return {
        "wins": wins, "ties": ties, "losses": losses,
        "wins_share": wins / len(values), "ties_share": ties / len(values), "losses_share": losses / len(values),
    }  # fmt: skip


def equal_length(
    sample: Sample, scores: Mapping[str, float], clusters: Sequence[Hashable], seed: int, level: float
) -> dict[str, float] | None:
    """Return `at_equal_length` of a sample's rated items; None if all length differences are equal.

    `length_effect` is the change in the log-odds of a win per standard deviation of the length difference (above 0 if
    longer replies win), `mean_difference` the policy's mean length minus SFT's, in characters.

    Args:
        clusters: the prompt of each item of `scores`.
    """
    replies = [sample.responses[item] for item in scores]
    gaps = np.array([len(row["policy"]) - len(row["sft"]) for row in replies], dtype=np.float64)
    if not np.ptp(gaps):
        return None
    rate, effect = at_equal_length(list(scores.values()), gaps, clusters, seed, level)
    return {
        "win_rate": rate.value, "low": rate.low, "high": rate.high,
        "length_effect": effect, "mean_difference": float(gaps.mean()),
    }  # fmt: skip


def at_equal_length(
    scores: ArrayLike, gaps: ArrayLike, clusters: Iterable[Hashable], seed: int, level: float, draws: int = _DRAWS
) -> tuple[Interval, float]:
    """Return the win rate at equal length, sigmoid(a), with its interval, and the effect b of the length difference.

    a and b maximise the likelihood of the logistic regression P(win) = sigmoid(a + b g / sd(g)) of items' scores (n,)
    in [0, 1] on the length differences g (n,) (Dubois et al. 2024, "Length-Controlled AlpacaEval", arXiv 2404.04475,
    the model with only its length term). The interval is by percentiles of a bootstrap over prompts (`clusters`).

    Raises:
        ValueError: lists of different lengths, no items, or all differences are equal.
    """
    y, g, codes = np.asarray(scores, dtype=np.float64), np.asarray(gaps, dtype=np.float64), cluster_codes(clusters)
    if not y.size == g.size == codes.size or not y.size or not np.ptp(g):
        raise ValueError(f"{y.size} scores, {g.size} differences of lengths, not all equal, and {codes.size} prompts")
    x = g / g.std()
    prompts = int(codes.max()) + 1
    drawn = np.random.default_rng([seed, 0x1E47]).multinomial(prompts, np.full(prompts, 1 / prompts), size=draws)
    weights = np.concatenate([np.ones((1, y.size)), drawn[:, codes].astype(np.float64)])
    fitted = _logistic(x, y, weights)
    rates = expit(fitted[:, 0])
    low, high = np.quantile(rates[1:], [(1 - level) / 2, (1 + level) / 2])
    value = float(rates[0])
    return Interval(value, min(value, float(low)), max(value, float(high))), float(fitted[0, 1])


def _logistic(x: FloatArray, y: FloatArray, weights: FloatArray) -> FloatArray:
    """Return intercepts and slopes (D, 2) of D logistic regressions of `y` (n,) on `x` (n,) with `weights` (D, n).

    Newton's method fits all at once; a library that fits one at a time takes seconds for a bootstrap. If `x` separates
    wins from losses, no finite fit is best; the steps then end at log-odds far beyond any win rate.
    """
    design = np.stack([np.ones_like(x), x], axis=1)
    products = design[:, :, None] * design[:, None, :]
    fitted = np.zeros((len(weights), 2))
    for _ in range(_STEPS):
        p = expit(fitted @ design.T)
        gradient = (weights * (y - p)) @ design
        information = np.einsum("dn,nij->dij", weights * p * (1 - p), products) + 1e-9 * np.eye(2)
        step = np.linalg.solve(information, gradient[:, :, None])[:, :, 0]
        size = np.abs(step).max(axis=1, keepdims=True)
        fitted += step * np.minimum(1.0, _LONGEST_STEP / np.maximum(size, 1e-12))
        if size.max() < 1e-10:
            break
    return fitted
