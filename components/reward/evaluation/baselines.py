"""What rules that read no text get right of test pairs: the longer one wins, the usual side wins. numpy only."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.reward.pairs import PreferencePair
from components.stats.calibration.measure import correctness
from components.stats.intervals import FloatArray


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

    return np.fromiter((rank(row, row["chosen"]) < rank(row, row["rejected"]) for row in rows), np.bool_, len(rows))


def majority_baseline(first_train: ArrayLike, first_test: ArrayLike) -> FloatArray:
    """Correctness (n_test,) of always naming the side that won more often in training (`chosen_shown_first`).

    Near a half unless an order leaks into the data, and it is measured, not assumed.
    """
    train, test = np.asarray(first_train, dtype=np.float64), np.asarray(first_test, dtype=np.float64)
    return test if train.size == 0 or train.mean() >= 0.5 else 1 - test
