"""Compare two sets of rows in length, language and prompts; each measure comes with the value that chance alone
reaches."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHANCE = 0.95
"""Quantile of a measure under the null hypothesis (both samples from one distribution); a value up to it counts as
chance."""
FOLDS = 5
LANGUAGE_SAMPLE, LANGUAGE_CHARACTERS = 500, 500
"""Number of texts on each side, and characters of each text, used for language detection (0.5 ms a text)."""
LEAST = 20
"""Fewest texts on each side for the classifier test."""


class DriftMeasure(NamedTuple):
    """A measure and the value that chance alone would reach."""

    value: float
    chance: float


def length_drift(train: NDArray[Any], heldout: NDArray[Any]) -> DriftMeasure | None:
    """Return the two-sample Kolmogorov-Smirnov statistic of lengths (n,) and (m,); None if a side is empty."""
    from scipy.stats import ks_2samp, kstwobign

    if not len(train) or not len(heldout):
        return None
    size = len(train) * len(heldout) / (len(train) + len(heldout))
    return DriftMeasure(float(ks_2samp(train, heldout).statistic), float(kstwobign.ppf(CHANCE) / np.sqrt(size)))


def language_drift(train: Sequence[str], heldout: Sequence[str], seed: int, draws: int = 500) -> DriftMeasure | None:
    """Return the total variation distance between the languages of two sets of texts, with its permutation-test level;
    None if a side is empty."""
    one, other = ([language_of(text) for text in texts[:LANGUAGE_SAMPLE]] for texts in (train, heldout))
    return distance(one, other, seed, draws)


def distance(one: Sequence[str], other: Sequence[str], seed: int, draws: int = 500) -> DriftMeasure | None:
    """Return the total variation distance between the label shares of two sides, with its permutation-test level; None
    if a side is empty."""
    if not one or not other:
        return None
    found = [*one, *other]
    names = {name: place for place, name in enumerate(dict.fromkeys(found))}
    codes = np.array([names[name] for name in found])
    first = np.arange(len(codes)) < len(one)

    def between(side: NDArray[np.bool_]) -> float:
        shares = [np.bincount(codes[s], minlength=len(names)) / s.sum() for s in (side, ~side)]
        return float(np.abs(shares[0] - shares[1]).sum() / 2)

    rng = np.random.default_rng(seed)
    chance = np.quantile([between(rng.permutation(first)) for _ in range(draws)], CHANCE)
    return DriftMeasure(between(first), float(chance))


def difference(one: NDArray[np.float64], other: NDArray[np.float64]) -> DriftMeasure | None:
    """Return the difference of the means of two 0/1 samples (n,) and (m,), NaN left out; None if a side is empty.

    The level that chance reaches is z sqrt(p (1 - p) (1 / n + 1 / m)) with p the pooled share and z the 97.5 % quantile
    of the normal distribution (two-sided).
    """
    one, other = (side[~np.isnan(side)] for side in (one, other))
    if not len(one) or not len(other):
        return None
    share = float(np.concatenate([one, other]).mean())
    spread = np.sqrt(share * (1 - share) * (1 / len(one) + 1 / len(other)))
    return DriftMeasure(float(abs(one.mean() - other.mean())), 1.96 * float(spread))


def language_of(text: str) -> str:
    """Return the likeliest language of a text's beginning (ISO 639-1)."""
    from py3langid import classify

    return str(classify(text[:LANGUAGE_CHARACTERS])[0])


def language_shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the share of each language in the texts, the most frequent first."""
    return {name: count / len(texts) for name, count in Counter(map(language_of, texts)).most_common()}


def told_apart(one: Sequence[str], other: Sequence[str], seed: int) -> DriftMeasure | None:
    """Return how well a classifier separates two sets of texts, as a cross-validated area under the ROC curve.

    The classifier is a logistic regression on words and pairs of words (a classifier two-sample test; Lopez-Paz and
    Oquab
    2017). The result is None if a side has fewer than `LEAST` distinct texts, or if all its texts are on both sides.
    """
    # A text on both sides cannot separate them, and the classifier would memorise it.
    common = set(one) & set(other)
    sides = [sorted(set(texts) - common) for texts in (one, other)]
    alike = len(common) / max(1, min(len(set(one)), len(set(other))))
    if min(map(len, sides)) < LEAST:
        return DriftMeasure(0.5, 0.5) if alike == 1 else None
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.model_selection import StratifiedKFold, cross_val_predict

    features = HashingVectorizer(n_features=2**16, ngram_range=(1, 2)).transform([*sides[0], *sides[1]])
    labels = np.repeat([0, 1], [len(sides[0]), len(sides[1])])
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32)
    model = LogisticRegression(C=10.0, max_iter=500)
    score = cross_val_predict(model, features, labels, cv=folds, method="decision_function")
    n, m = map(len, sides)
    # Texts on both sides count as ties. The null deviation is that of the Mann-Whitney statistic.
    value = (1 - alike) * float(roc_auc_score(labels, score)) + alike * 0.5
    return DriftMeasure(value, 0.5 + 1.645 * float(np.sqrt((n + m + 1) / (12 * n * m))))
