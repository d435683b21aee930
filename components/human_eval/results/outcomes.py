"""Wins, ties and losses of the policy, and its win rate on replies of equal length."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypedDict

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import expit

from components.human_eval.labels import Labels, Sample
from components.human_eval.results.summary import TIES
from components.stats.intervals import FloatArray, Interval, cluster_codes

_STEPS, _LONGEST_STEP = 50, 2.0
_DRAWS = 1000


class Outcomes(TypedDict):
    """How often the policy won, and the shares of all; `both_bad` is among the ties."""

    wins: int
    ties: int
    losses: int
    wins_share: float
    ties_share: float
    losses_share: float


class EqualLength(TypedDict):
    """The win rate that the policy would have if its replies were as long as SFT's."""

    win_rate: float
    low: float
    high: float
    length_effect: float
    """Log-odds of a win by a standard deviation of the difference of lengths; above 0 the longer reply is preferred."""
    mean_difference: float
    """Mean of the lengths of the policy's replies less SFT's, in characters."""


def outcomes(scores: Iterable[float]) -> Outcomes:
    """Count wins, ties and losses: of items, a win is a mean rating above a half; of ratings, one for the policy."""
    found = list(scores)
    wins, losses = sum(each > 0.5 for each in found), sum(each < 0.5 for each in found)
    ties = len(found) - wins - losses
    return {
        "wins": wins, "ties": ties, "losses": losses,
        "wins_share": wins / len(found), "ties_share": ties / len(found), "losses_share": losses / len(found),
    }  # fmt: skip


def rating_outcomes(sample: Sample, rated: Labels) -> Outcomes:
    """`outcomes` of the single ratings."""
    return outcomes(
        0.5 if rating in TIES else float(rating == sample.policy_side[item])
        for item, each in rated.items()
        for rating in each
        if rating
    )


def equal_length(
    sample: Sample, scores: Mapping[str, float], clusters: Sequence[Hashable], seed: int, level: float
) -> EqualLength | None:
    """`at_equal_length` of a sample's rated items; None where all differences of lengths are equal.

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
    """The win rate where both replies are equally long, sigmoid(a), and the effect b of the difference of lengths.

    a and b maximise the likelihood of the logistic regression P(win) = sigmoid(a + b g / sd(g)) of items' scores (n,)
    in [0, 1] on the differences g (n,) (Dubois et al. 2024, "Length-Controlled AlpacaEval", arXiv 2404.04475, equation
    1, with the difference alone). The interval is the percentiles of a bootstrap that resamples prompts (`clusters`).

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
    """Intercepts and slopes (D, 2) of D logistic regressions of `y` (n,) on `x` (n,) with `weights` (D, n).

    Newton's method for all at once: a library fits one at a time, which takes seconds for a bootstrap. Where wins and
    losses can be told apart by `x` alone no finite fit is best; the steps end at log-odds far beyond any win rate.
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
