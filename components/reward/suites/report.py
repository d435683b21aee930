"""Accuracy, calibration and influence of length on a suite's pairs, by subset. Needs numpy and scipy only."""

from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from components.reward.config import BINS
from components.reward.evaluation.length import balanced_length_accuracy
from components.stats.calibration.calibration_metrics import calibration, correctness
from components.stats.intervals import FloatArray, clustered_mean, clustered_proportion

FEWEST = 100
"""Fewest pairs of a subset whose calibration error is reported; with fewer it is mostly noise."""
FEWEST_PROMPTS = 5
_CALIBRATION = (
    "ece", "ece_low", "ece_high", "ece_null_95", "calibration_slope", "slope_low", "slope_high", "slope_capped",
)  # fmt: skip


def suite_report(
    scores: FloatArray, tokens: NDArray[np.int64], subsets: Sequence[str], clusters: Sequence[str], temperature: float
) -> dict[str, Any]:
    """Return a report on n pairs for JSON: `overall`, and `subsets` by name.

    Args:
        scores: (2, n) raw scores, the chosen responses' first.
        tokens: (2, n) tokens of the responses.
        subsets, clusters: (n,) the subset and the prompt of each pair; intervals are clustered by prompt.
        temperature: raw differences divided by this are log-odds.

    Returns:
        For all pairs and for each subset: `pairs`, `prompts`; `accuracy` (equal scores count 1/2), `log_loss` in nats
        per pair and `brier`, each with `_low` and `_high`; with at least `FEWEST` pairs `ece` with `ece_null_95`, and
        `calibration_slope`; `chosen_tokens`, `rejected_tokens` (means), `length_accuracy` (of the rule that the longer
        one wins), `accuracy_chosen_longer`, `accuracy_chosen_shorter` and `balanced_length_accuracy`, None if there is
        no such pair. `mean_of_subsets` is the unweighted mean of the subsets' accuracies.
    """
    names = np.array(subsets)
    by_subset = {}
    for name in dict.fromkeys(subsets):
        inside = names == name
        by_subset[name] = _of(scores[:, inside], tokens[:, inside], list(compress(clusters, inside)), temperature)
    mean = float(np.mean([numbers["accuracy"] for numbers in by_subset.values()]))
    return {"overall": _of(scores, tokens, clusters, temperature), "mean_of_subsets": mean, "subsets": by_subset}


def _of(scores: FloatArray, tokens: NDArray[np.int64], clusters: Sequence[str], temperature: float) -> dict[str, Any]:
    margins, gap = (scores[0] - scores[1]).astype(np.float64), tokens[0] - tokens[1]
    right, prompts = correctness(margins), len(set(clusters))
    wrong = 1 / (1 + np.exp(margins / temperature))
    by_side = balanced_length_accuracy(right, gap, clusters)
    out: dict[str, Any] = {
        "pairs": margins.size,
        "prompts": prompts,
        **clustered_proportion(right, clusters).named("accuracy"),
        **clustered_mean(np.logaddexp(0, -margins / temperature), clusters).named("log_loss"),
        **clustered_mean(np.square(wrong), clusters).named("brier"),
        "chosen_tokens": float(tokens[0].mean()),
        "rejected_tokens": float(tokens[1].mean()),
        "length_accuracy": float(correctness(gap).mean()),
        **by_side["chosen_longer"].named("accuracy_chosen_longer"),
        **by_side["chosen_shorter"].named("accuracy_chosen_shorter"),
        **by_side["balanced"].named("balanced_length_accuracy"),
    }
    if margins.size >= FEWEST and prompts >= FEWEST_PROMPTS:
        numbers = calibration(margins, clusters, temperature, seed=0, bins=BINS).numbers
        finite = {name: value for name in _CALIBRATION if (value := numbers[name]) is not None and np.isfinite(value)}
        out |= dict.fromkeys(_CALIBRATION) | finite
    return out
