"""Compare two sets of rows in length, language and prompts; each measure comes with the value that chance alone
reaches."""

import math
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
RELABELLED = 999
"""Permutations of the labels of the classifier test."""
RIDGE = 1.0
"""Penalty of the classifier test's ridge regression, whose texts have norm 1."""


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
    labels = [*one, *other]
    names = {name: place for place, name in enumerate(dict.fromkeys(labels))}
    codes = np.array([names[name] for name in labels])
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

    This is a classifier two-sample test (Lopez-Paz and Oquab 2017) with ridge regression of the labels on words and
    pairs of words. The level that chance reaches is a quantile over `RELABELLED` permutations of the labels (Golland
    and Fischl 2003). Labels are permuted within each fold, so that every permutation is as stratified as the data.
    All permutations share each fold's solution, so the cost is one matrix of n x n products of texts and `FOLDS`
    solutions.

    The result is None if a side has fewer than `LEAST` texts that the other side lacks, unless one side has no such
    text at all: then nothing separates them (0.5).
    """
    # A text on both sides cannot separate them, and the classifier would memorise it.
    common = set(one) & set(other)
    sides = [sorted(set(texts) - common) for texts in (one, other)]
    alike = len(common) / max(1, min(len(set(one)), len(set(other))))
    if min(map(len, sides)) < LEAST:
        return DriftMeasure(0.5, 0.5) if alike == 1 else None
    from scipy.stats import rankdata
    from sklearn.feature_extraction.text import HashingVectorizer
    from sklearn.kernel_ridge import KernelRidge
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from threadpoolctl import threadpool_limits

    features = HashingVectorizer(n_features=2**16, ngram_range=(1, 2)).transform([*sides[0], *sides[1]])
    n, m = map(len, sides)
    labels = np.repeat([0.0, 1.0], [n, m])
    folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=seed % 2**32).split(features, labels))
    rng = np.random.default_rng(seed)
    drawn = np.repeat(labels[:, None], RELABELLED + 1, axis=1)  # the first column stays as it is
    for _, fold in folds:
        drawn[fold, 1:] = rng.permuted(drawn[fold, 1:], axis=0)
    with threadpool_limits(1):  # the number of threads changes the rounding of sums
        products = (features @ features.T).toarray()
        model = KernelRidge(alpha=RIDGE, kernel="precomputed")
        scores = cross_val_predict(model, products, drawn - m / (n + m), cv=folds)
    ranks = rankdata(np.round(scores, 6), axis=0)
    areas = ((ranks * drawn).sum(axis=0) - m * (m + 1) / 2) / (n * m)
    # Texts on both sides count as ties.
    areas = (1 - alike) * areas + alike * 0.5
    level = np.sort(areas[1:])[math.ceil(CHANCE * (RELABELLED + 1)) - 1]
    return DriftMeasure(float(areas[0]), float(level))
