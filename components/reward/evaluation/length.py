"""How the scores of test pairs depend on length. Needs numpy and scipy only."""

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.stats.intervals import (
    FloatArray,
    Interval,
    at_least_of_shares,
    cluster_codes,
    clustered_mean,
    clustered_proportion,
)

_CHUNK = 1_000
"""Number of texts that are tokenised at a time."""
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def response_tokens(tokenizer: Any, texts: Iterable[str], most: int) -> NDArray[np.int64]:
    """Return the number of tokens (n,) of each response as it is scored: with EOS, cut at `most`."""
    remaining, lengths = iter(texts), list[int]()
    while chunk := list(islice(remaining, _CHUNK)):
        lengths += [len(ids) + 1 for ids in tokenizer(chunk, add_special_tokens=False)["input_ids"]]
    return np.minimum(np.array(lengths, np.int64), most)


def balanced_length_accuracy(
    correct: ArrayLike, length_gap: ArrayLike, clusters: Iterable[Hashable]
) -> dict[str, Interval]:
    """Return the accuracy on pairs whose longer response won, on those whose shorter one did, and their mean.

    A rule that sees only length is right on one side and wrong on the other, so its mean is 0.5, however often the
    longer response wins. The mean's interval comes from its linearisation, clustered by prompt: a pair of side s, which
    has n_s of the n pairs, has the influence (correct - accuracy_s) n / (2 n_s). It is at least as wide as the sides'
    own intervals imply (`at_least_of_shares`), since a side of one pair shows no variation.

    Args:
        correct: (n,) 1, 0, or 1/2 for a tie.
        length_gap: (n,) length(chosen) - length(rejected); pairs of equal length are left out.
        clusters: (n,) the pairs' prompts.

    Returns:
        `chosen_longer`, `chosen_shorter`, `balanced`; NaN if there is no such pair.
    """
    right, side = np.asarray(correct, dtype=np.float64), np.sign(np.asarray(length_gap, dtype=np.float64))
    codes = cluster_codes(clusters)
    accuracies = {"chosen_longer": UNKNOWN, "chosen_shorter": UNKNOWN, "balanced": UNKNOWN}
    influence = np.zeros(right.size)
    for name, sign in (("chosen_longer", 1), ("chosen_shorter", -1)):
        here = side == sign
        if here.any():
            accuracies[name] = clustered_proportion(right[here], codes[here])
            influence[here] = (right[here] - accuracies[name].value) / (2 * here.sum())
    if (side > 0).any() and (side < 0).any():
        unequal = side != 0
        mean = (accuracies["chosen_longer"].value + accuracies["chosen_shorter"].value) / 2
        linearised = clustered_mean(mean + influence[unequal] * unequal.sum(), codes[unequal])
        sides = (0.5, accuracies["chosen_longer"]), (0.5, accuracies["chosen_shorter"])
        accuracies["balanced"] = at_least_of_shares(linearised, sides)
    return accuracies


def length_partial_correlation(scores: ArrayLike, lengths: ArrayLike, clusters: Iterable[Hashable]) -> Interval:
    """Return the partial correlation of score and length given the label, over the 2n responses of n pairs.

    Score, length and label (1 chosen, 0 rejected) are centred on their mean over the prompt's responses. Score and
    length are then replaced by their residuals from the regression on the label, and r is Pearson's correlation of
    these. With one pair per prompt r is the correlation of the score gap with the length gap. It is 0 if length carries
    no information about the score beyond the label. Interval: with u and v the standardised residuals, a response has
    the influence u v - r (u^2 + v^2) / 2 on r. Influences are summed by prompt, and the ends are computed on Fisher's
    scale, atanh r. NaN if all residuals of scores or lengths are 0.

    Args:
        scores, lengths: (2, n), of the chosen and the rejected responses.
        clusters: (n,) the pairs' prompts.
    """
    codes = np.tile(cluster_codes(clusters), 2)
    label = np.repeat([1.0, 0.0], codes.size // 2)
    score, length, side = (
        _within(np.asarray(x, dtype=np.float64).reshape(-1), codes) for x in (scores, lengths, label)
    )
    u, v = (x - side * (x @ side) / (side @ side) for x in (score, length))
    if not (_varies(u, scores) and _varies(v, lengths)):
        return UNKNOWN
    u, v = u / u.std(), v / v.std()
    r = float((u * v).mean())
    error = clustered_mean(u * v - r * (u * u + v * v) / 2, codes)
    reach = (error.high - error.value) / max(1 - r * r, 1e-12)
    return Interval(r, float(np.tanh(np.arctanh(r) - reach)), float(np.tanh(np.arctanh(r) + reach)))


def _within(values: FloatArray, codes: NDArray[np.int64]) -> FloatArray:
    """Return values minus the mean of their cluster, (n,)."""
    return values - (np.bincount(codes, weights=values) / np.bincount(codes))[codes]


def _varies(residuals: FloatArray, values: ArrayLike) -> bool:
    """Return whether residuals are larger than the rounding error of the values from which they were computed."""
    return bool(np.abs(residuals).max() > 1e-9 * max(1e-300, float(np.abs(values).max())))
