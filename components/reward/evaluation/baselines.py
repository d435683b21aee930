"""Accuracy of rules that read no text: the longer response wins, the usual side wins. Needs numpy only."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.reward.training_pairs import PreferencePair
from components.stats.calibration.calibration_metrics import correctness
from components.stats.intervals import FloatArray


def length_baseline(length_gap_train: ArrayLike, length_gap_test: ArrayLike) -> tuple[FloatArray, str]:
    """Return the correctness (n_test,) of a rule that sees only lengths, and the rule: `longer` or `shorter` wins.

    The gaps are length(chosen) - length(rejected), in characters or tokens. The rule is the one that is right more
    often on the training pairs (`longer` in a tie). Equal lengths count 1/2.
    """
    train = np.sign(np.asarray(length_gap_train, dtype=np.float64))
    shorter = train.sum() < 0
    test = correctness(length_gap_test)
    return (1 - test, "shorter") if shorter else (test, "longer")


def chosen_shown_first(rows: Sequence[PreferencePair]) -> NDArray[np.bool_]:
    """Return (n,) whether the chosen response comes first in an order that is independent of the label (by sha256)."""

    def rank(row: PreferencePair, response: str) -> bytes:
        return hashlib.sha256(f"{row['prompt']}\0{response}".encode("utf-8", "surrogatepass")).digest()

    return np.fromiter((rank(row, row["chosen"]) < rank(row, row["rejected"]) for row in rows), np.bool_, len(rows))


def majority_baseline(first_train: ArrayLike, first_test: ArrayLike) -> FloatArray:
    """Return the correctness (n_test,) of always choosing the side that won more often in training.

    Sides are those of `chosen_shown_first`. The accuracy is near 1/2, but it is measured rather than assumed.
    """
    train, test = np.asarray(first_train, dtype=np.float64), np.asarray(first_test, dtype=np.float64)
    return test if train.size == 0 or train.mean() >= 0.5 else 1 - test
