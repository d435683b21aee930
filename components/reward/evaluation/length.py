"""What length has to do with the scores of test pairs. numpy and scipy only."""

from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.stats.intervals import FloatArray, Interval, cluster_codes, clustered_mean, clustered_proportion

_CHUNK = 1_000
"""Texts that are tokenised together."""
UNKNOWN = Interval(float("nan"), float("nan"), float("nan"))


def response_tokens(tokenizer: Any, texts: Iterable[str], most: int) -> NDArray[np.int64]:
    """Tokens (n,) of each response as it is scored: with its EOS, cut at `most`."""
    remaining, lengths = iter(texts), list[int]()
    while chunk := list(islice(remaining, _CHUNK)):
        lengths += [len(ids) + 1 for ids in tokenizer(chunk, add_special_tokens=False)["input_ids"]]
    return np.minimum(np.array(lengths, np.int64), most)


def balanced_length_accuracy(
    correct: ArrayLike, length_gap: ArrayLike, clusters: Iterable[Hashable]
) -> dict[str, Interval]:
    """Accuracy where the longer response won, where the shorter did, and the mean of the two.

    A rule that only sees length is right on one side and wrong on the other, so its mean is 0.5 however often the
    longer wins. The mean's interval is that of its linearisation, clustered: a pair of side s, which has n_s of the n
    pairs, moves it by (correct - accuracy_s) n / (2 n_s).

    Args:
        correct: (n,) 1, 0 or a half for a tie.
        length_gap: (n,) length(chosen) - length(rejected); pairs of equal length are left out.

    Returns:
        `chosen_longer`, `chosen_shorter`, `balanced`; NaN where there is no such pair.
    """
    right, side = np.asarray(correct, dtype=np.float64), np.sign(np.asarray(length_gap, dtype=np.float64))
    codes = cluster_codes(clusters)
    found = {"chosen_longer": UNKNOWN, "chosen_shorter": UNKNOWN, "balanced": UNKNOWN}
    influence = np.zeros(right.size)
    for name, sign in (("chosen_longer", 1), ("chosen_shorter", -1)):
        here = side == sign
        if here.any():
            found[name] = clustered_proportion(right[here], codes[here])
            influence[here] = (right[here] - found[name].value) / (2 * here.sum())
    if (side > 0).any() and (side < 0).any():
        unequal = side != 0
        mean = (found["chosen_longer"].value + found["chosen_shorter"].value) / 2
        found["balanced"] = clustered_mean(mean + influence[unequal] * unequal.sum(), codes[unequal])
    return found


def length_partial_correlation(scores: ArrayLike, lengths: ArrayLike, clusters: Iterable[Hashable]) -> Interval:
    """Partial correlation of score and length given the label, over the 2n responses of n pairs.

    Score, length and label (1 chosen, 0 rejected) are taken less their mean over the prompt's responses; score and
    length less their regression on the label; then r is Pearson's. With one pair a prompt that is the correlation of
    the score gap with the length gap: 0 where length says nothing of the score but what the label says. Interval: with
    u, v the residuals over their deviations, a response moves r by u v - r (u^2 + v^2) / 2; these are summed by prompt,
    and the ends are taken on Fisher's scale, atanh r. NaN where scores or lengths leave nothing to correlate.

    Args:
        scores, lengths: (2, n), of the chosen and the rejected responses.
        clusters: n prompts.
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
    """Values less the mean of their cluster; shape (n,)."""
    return values - (np.bincount(codes, weights=values) / np.bincount(codes))[codes]


def _varies(residuals: FloatArray, values: ArrayLike) -> bool:
    """Whether residuals are more than the rounding of what they are left of."""
    return bool(np.abs(residuals).max() > 1e-9 * max(1e-300, float(np.abs(values).max())))
