"""How often a reward model agrees with people on pairs that never train: what the rounds of iterate are compared by."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.data.splits import prompt_key
from components.reward.config import RewardJob
from components.reward.loading import load_scorer
from components.reward.pairs import PreferencePair, encode_pairs
from components.reward.scoring import score_sequences
from components.stats.calibration.measure import correctness
from components.stats.intervals import clustered_mean, paired_gain


def judged_metrics(
    job: RewardJob, inputs: Mapping[str, Path], test: Sequence[PreferencePair], model: Any, tokenizer: Any
) -> dict[str, float]:
    """Measure the model, and the one that it was refreshed from, on what people judged in all earlier rounds.

    `reward/judged` is the share of decided pairs in which the response that most people preferred has the higher score
    (equal scores count a half), with its 95 % interval clustered by prompt; `reward/judged_previous` is that of the
    earlier model, `reward/judged_gain` the paired difference.

    Args:
        inputs: of a refreshed model with `previous_reward`.
        test: the test pairs; those that people judged in a batch count.
        model: scores a text; of an ensemble the whole.

    Returns:
        Metrics; empty where people have judged nothing yet.
    """
    rows = [row for row in test if "judged_in" in row]
    if not rows:
        return {}
    clusters = [prompt_key(row["prompt"]) for row in rows]
    right = agreement(job, model, tokenizer, rows)
    found = {"reward/judged_pairs": float(len(rows))} | clustered_mean(right, clusters).metrics("reward/judged")
    if "previous_reward" in inputs:
        before = agreement(job, load_scorer(inputs["previous_reward"], job.runtime)[0], tokenizer, rows)
        found |= clustered_mean(before, clusters).metrics("reward/judged_previous")
        found |= paired_gain(right, before, clusters).metrics("reward/judged_gain")
    return found


def agreement(job: RewardJob, model: Any, tokenizer: Any, rows: Sequence[PreferencePair]) -> np.ndarray:
    """1 for each pair (n,) whose chosen response the model scores higher, a half where the scores are equal, else 0."""
    pairs = encode_pairs(tokenizer, rows, job.generation)
    chosen, rejected = (
        score_sequences(model, tokenizer.pad_token_id, side, job.runtime).double().numpy()
        for side in ([pair.chosen for pair in pairs], [pair.rejected for pair in pairs])
    )
    return correctness(chosen - rejected)
