"""Estimate the share of flipped labels from the pairs themselves, with an interval.

A logistic regression on the difference of two responses' features is cross-validated: each pair is scored by a model
that was trained on no pair of its group (a prompt, or one ranking's pairs). If labels are flipped at random at a rate
ε, then even among pairs of which the model is very sure a share ε has the other label, so the model is right in at most
1 - ε of them. With s the score of the chosen response over the rejected one,

    P(chosen | s) = ε + (1 - 2 ε) σ(a s),  0 ≤ ε < 1/2, a > 0.

The floor ε is the share of flipped labels, fitted by maximum likelihood. Its 95 % interval comes from the profile
likelihood (twice the log-likelihood ratio within the quantile of F at 1 and groups - 1; Wilks 1938). Pairs of a group
may be flipped together, so that quantile is multiplied by the ratio of ε's sandwich variance over groups to that over
independent pairs, if above 1 (Rotnitzky and Jewell 1990, Biometrika 77:485). Northcutt et al. (2021, Confident
Learning, the confident joint) estimate the same rate from the pairs that the model is sure of, and count the model's
own mistakes as flips: on real pairs with about 31 % planted flips their estimate was 0.39, and this one 0.33
(docs/decisions.md).

Limit: a preference that the features do not capture looks like a flip, because then no score is sure. So there is no
estimate if the model is right in less than `LEAST_ACCURACY` of the pairs, or if there are fewer than `LEAST_PAIRS`, or
fewer than `LEAST_GROUPS`.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.data.words import words_of
from components.stats.intervals import cluster_codes

LEAST_PAIRS, LEAST_GROUPS = 1_000, 20
LEAST_ACCURACY = 0.6
"""Cross-validated accuracy below which the scores are too weak for an estimate."""
_FOLDS = 5
_FEATURES = 2**14
_GRID = np.concatenate([[0.0], np.linspace(0.004, 0.496, 124)])


class LabelNoise(NamedTuple):
    """An estimate of the share of flipped labels."""

    value: float
    low: float
    high: float
    """The upper end of its 95 % interval; `low` is the lower end."""
    accuracy: float
    """Share of the pairs that the cross-validated model agrees with."""
    pairs: int


def label_noise(
    chosen: Sequence[str], rejected: Sequence[str], seed: int, prompts: Sequence[Hashable]
) -> LabelNoise | float | None:
    """Estimate the share of flipped labels of pairs of texts (n,).

    Args:
        prompts: (n,) whose pairs are one group.

    Returns:
        The estimate; only the model's accuracy if that is too low for an estimate; None if there are too few pairs or
        groups.
    """
    groups = cluster_codes(prompts)
    if len(chosen) < LEAST_PAIRS or groups.max() < LEAST_GROUPS - 1:
        return None
    scores = cross_validated_scores(chosen, rejected, groups, seed)
    accuracy = float((scores > 0).mean())
    if accuracy < LEAST_ACCURACY:
        return accuracy
    value, low, high = flip_rate(scores, groups)
    return LabelNoise(value, low, high, accuracy, len(chosen))


def cross_validated_scores(
    chosen: Sequence[str], rejected: Sequence[str], groups: NDArray[np.int64], seed: int
) -> NDArray[np.float64]:
    """Return scores (n,) of chosen over rejected responses, in logits, each from a model that was not trained on the
    pair's group.

    The features of a response are its words and pairs of words, hashed, and the logarithm of its length; a pair's
    features are the difference, so the model has no intercept and does not depend on the order.
    """
    from scipy.sparse import csr_matrix, diags, hstack
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, cross_val_predict

    hashing = HashingVectorizer(n_features=_FEATURES, ngram_range=(1, 2))
    length = np.log1p([len(words_of(text)) for text in chosen]) - np.log1p([len(words_of(text)) for text in rejected])
    difference = hstack([hashing.transform(chosen) - hashing.transform(rejected), csr_matrix(length[:, None])]).tocsr()
    sides = np.where(np.random.default_rng(seed).random(len(chosen)) < 0.5, 1.0, -1.0)
    folds = GroupKFold(_FOLDS, shuffle=True, random_state=seed % 2**32)
    model = LogisticRegression(C=1.0, fit_intercept=False, solver="liblinear")
    decisions = cross_val_predict(model, diags(sides) @ difference, sides, groups=groups, cv=folds,
                              method="decision_function")  # fmt: skip
    return np.asarray(decisions * sides, np.float64)


def flip_rate(scores: NDArray[np.float64], groups: NDArray[np.int64]) -> tuple[float, float, float]:
    """Fit the flip rate to scores (n,) of chosen over rejected responses, whose groups (n,) may be flipped together;
    return it and the ends of its 95 % interval."""
    from scipy.optimize import minimize_scalar
    from scipy.special import expit
    from scipy.stats import f

    def fit(flips: float) -> tuple[float, float]:
        def loss(log_scale: float) -> float:
            return -float(np.log(flips + (1 - 2 * flips) * expit(np.exp(log_scale) * scores)).sum())

        best = minimize_scalar(loss, bounds=(-4, 6), method="bounded")
        return float(best.fun), float(best.x)

    losses, log_scales = np.array([fit(flips) for flips in _GRID]).T
    best = losses.argmin()
    flips, logits = _GRID[best], np.exp(log_scales[best]) * scores
    right = expit(logits)
    slopes = np.column_stack([1 - 2 * right, (1 - 2 * flips) * right * (1 - right) * logits])
    slopes /= (flips + (1 - 2 * flips) * right)[:, None]
    slopes -= slopes.mean(axis=0)
    count = int(groups.max()) + 1
    of_groups = np.column_stack([np.bincount(groups, weights=slope) for slope in slopes.T])
    covariance = np.linalg.pinv(slopes.T @ slopes)
    inflation = (covariance @ of_groups.T @ of_groups @ covariance)[0, 0] / covariance[0, 0]
    within = max(1.0, inflation * count / (count - 1)) * f.ppf(0.95, 1, count - 1) / 2
    likely = _GRID[losses <= losses[best] + within]
    return float(flips), float(likely.min()), float(likely.max())
