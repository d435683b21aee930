"""How often a reward model agrees with people on pairs that are never trained on; this compares iterate's rounds."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.data.splits import prompt_key
from components.reward.config import RewardJob
from components.reward.pair_scores import score_pairs
from components.reward.scoring import load_scorer
from components.reward.training_pairs import PreferencePair, encode_pairs
from components.stats.calibration.calibration_metrics import correctness
from components.stats.intervals import clustered_proportion, gain_in_shares


def agreement_metrics(
    job: RewardJob, inputs: Mapping[str, Path], test: Sequence[PreferencePair], model: Any, tokenizer: Any
) -> dict[str, float]:
    """Measure the model, and the one from which it was refreshed, on the pairs that people judged in earlier rounds.

    `reward/judged` is the share of decided pairs in which the response that most people preferred has the higher score
    (equal scores count 1/2), with its 95 % interval clustered by prompt. `reward/judged_previous` is the same for the
    earlier model, `reward/judged_gain` the paired difference.

    Args:
        inputs: with `previous_reward`, if the model was refreshed.
        test: the test pairs; only those that people judged in a batch are used.
        model: the reward model, for an ensemble the combined one.

    Returns:
        Metrics; empty if people have judged nothing yet.
    """
    rows = [row for row in test if "judged_in" in row]
    if not rows:
        return {}
    clusters = [prompt_key(row["prompt"]) for row in rows]
    right = agreement(job, model, tokenizer, rows)
    metrics = {"reward/judged_pairs": float(len(rows))} | clustered_proportion(right, clusters).metrics("reward/judged")
    if "previous_reward" in inputs:
        before = agreement(job, load_scorer(inputs["previous_reward"], job.runtime)[0], tokenizer, rows)
        metrics |= clustered_proportion(before, clusters).metrics("reward/judged_previous")
        metrics |= gain_in_shares(right, before, clusters).metrics("reward/judged_gain")
    return metrics


def agreement(job: RewardJob, model: Any, tokenizer: Any, rows: Sequence[PreferencePair]) -> np.ndarray:
    """Return 1 for each pair (n,) whose chosen response scores higher, 1/2 if the scores are equal, else 0."""
    pairs = encode_pairs(tokenizer, rows, job.generation)
    return correctness(np.subtract(*score_pairs(model, tokenizer.pad_token_id, pairs, job.runtime)))
