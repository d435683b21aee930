"""Whether a reward model uses the prompt: its margins under the pairs' own prompts and under those of other pairs."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from components.gates.self_checks import SelfChecks
from components.reward.config import RewardJob
from components.reward.pair_scores import score_pairs
from components.reward.training_pairs import PreferencePair, encode_pairs

MOST, FEW = 256, 200
"""Most pairs that are scored, and fewest that are judged."""
LEAST, NONE = 2.5, 1.0
"""Standard errors by which the mean margin should fall: 7 on the demo's 256 pairs. Below the second number, on the
built-in task, the model does without the prompt."""
BETTER_THAN_CHANCE = 0.6
"""A model with a lower accuracy has learned too little to be judged."""


def with_other_prompts(rows: Sequence[PreferencePair]) -> list[PreferencePair]:
    """Return the rows with the prompt of a row half the list away, or of the next one after it that has another."""
    n, swapped = len(rows), list[Any]()
    for i, row in enumerate(rows):
        others = (rows[(i + n // 2 + step) % n]["prompt"] for step in range(n))
        swapped.append({**row, "prompt": next((prompt for prompt in others if prompt != row["prompt"]), row["prompt"])})
    return swapped


def check_prompt_use(
    model: Any, tokenizer: Any, test: Sequence[PreferencePair], job: RewardJob, task: str
) -> SelfChecks:
    """Return the judgement that the margins of test pairs fall under another pair's prompt by `LEAST` errors.

    In the built-in task the prompt decides which response is right, so a model that does without it read wrong prompts.
    Other data may hold preferences that do not depend on the prompt: there it warns.

    Raises:
        CheckFailed: they fall by less than `NONE` errors, and the data are the built-in task's.
    """
    checks, name, rows = SelfChecks(), "reward.prompt_use", [*test[:MOST]]
    if len(rows) < FEW:
        checks.skip(name, f"{len(rows)} test pairs are too few")
        return checks
    pad_id, margins = tokenizer.pad_token_id, list[np.ndarray]()
    for some in (rows, with_other_prompts(rows)):
        pairs = encode_pairs(tokenizer, some, job.generation, job.reward)
        chosen, rejected = score_pairs(model, pad_id, pairs, job.runtime)
        margins.append(np.asarray(chosen, float) - np.asarray(rejected, float))
    right, other = (float((margin > 0).mean()) for margin in margins)
    if right < BETTER_THAN_CHANCE:
        checks.skip(name, f"the accuracy on {len(rows)} test pairs is {right:.2f}, near chance")
        return checks
    falls = margins[0] - margins[1]
    errors = float(falls.mean()) / max(float(falls.std(ddof=1)) / math.sqrt(len(falls)), 1e-12)
    numbers = (
        f"the accuracy on {len(rows)} test pairs is {right:.3f}, and {other:.3f} under another pair's prompt; margins "
        f"fall by {errors:.1f} standard errors (at least {LEAST:g} are expected)"
    )
    checks.judge(name, errors >= LEAST, numbers, fails=errors < NONE and task == "support-desk")
    return checks
