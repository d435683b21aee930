"""Self-checks of a reward model: it uses the prompt, prefers chosen responses, and is reported and scaled as it is."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import expit
from scipy.stats import rankdata

from components.data.support_desk.task import task_name
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from components.models.batching import encode_prompt
from components.models.sampling import SftAnswers
from components.reward.config import BINS, EnsembleConfig, RewardJob
from components.reward.pair_scores import score_pairs
from components.reward.scoring import ScoreScale, combine, read_sft_scores, score_sequences
from components.reward.training_pairs import PreferencePair, encode_pairs
from components.stats.calibration.calibration_metrics import temperature_at_end
from components.stats.intervals import FloatArray, clustered_mean

MOST, FEW = 256, 200
"""About how many pairs are scored, and fewest that are judged with other prompts."""
AGAIN, ANSWERS_SCORED = 16, 48
"""About how many pairs of a held-out split, and how many of SFT's answers, are scored again."""
EXACT, ROUNDED = 0.02, 0.2
"""Largest median difference of two scores of the same texts, in deviations: in float32, and in any number format."""
LEAST, NONE = 2.5, 1.0
"""Standard errors by which the mean margin should fall: 7 on the demo's 256 pairs. Below the second number, on the
built-in task, the model does without the prompt."""
BETTER_THAN_CHANCE = 0.6
"""A model with a lower accuracy has learned too little to be judged."""


def check_model(
    model: Any, tokenizer: Any, job: RewardJob, inputs: Mapping[str, Path], test: Sequence[PreferencePair], out: Path,
    margins: Mapping[str, FloatArray], metrics: Mapping[str, float],
) -> None:  # fmt: skip
    """Judge the trained model and what its stage reports, and write the results to the attachments of `out`.

    Raises:
        CheckFailed: as for the other functions here, which explain the arguments. A judge's pairs are in `judge_data`.
    """
    data, scale, lora = inputs["data"], ScoreScale.read(out / "artifact"), job.reward.lora
    rounded = job.runtime.dtype != "float32" or job.runtime.tf32 or (lora is not None and lora.quantize is not None)
    checks, allowed = check_prompt_use(model, tokenizer, test, job, task_name(data)), ROUNDED if rounded else EXACT
    pairs, names = inputs.get("judge_data", data), ("reward.sft_scores", "reward.sft_scores")
    check_pairs(checks, model, tokenizer, job, pairs, scale.temperature, margins, metrics, allowed)
    check_sft_scores(checks, names, model, tokenizer, job, data, out / "artifact", scale, EnsembleConfig(), allowed)
    checks.write(out)


def margins_of(model: Any, tokenizer: Any, rows: Sequence[PreferencePair], job: RewardJob) -> FloatArray:
    """Return the chosen responses' scores minus the rejected ones' (n,)."""
    pairs = encode_pairs(tokenizer, rows, job.generation, job.reward)
    margins: FloatArray = np.subtract(*score_pairs(model, tokenizer.pad_token_id, pairs, job.runtime))
    return margins


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
    margins = [margins_of(model, tokenizer, some, job) for some in (rows, with_other_prompts(rows))]
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


def check_pairs(
    checks: SelfChecks, model: Any, tokenizer: Any, job: RewardJob, data: Path, temperature: float,
    margins: Mapping[str, FloatArray], metrics: Mapping[str, float], allowed: float,
) -> None:  # fmt: skip
    """Judge by the pairs of `data`, read from disk, that the model learned their labels, and the reported numbers.

    Args:
        temperature: the published one. It minimises the log loss of the calibration pairs, whose derivative by
            log T, the mean of d/T sigmoid(-d/T), is then 0; or it is an end of its range, and the loss falls beyond.
        margins: d, by which the stage measured, of its pairs of `calibration` and `test`.
        metrics, allowed: the stage's `reward/NAME`; the median difference of margins, in deviations.

    Raises:
        CheckFailed: with labels exchanged the training pairs' log loss is below that of a model that knows nothing; a
            few pairs, scored one by one, have other margins; or a number is not what it is named.
    """
    rows = read_split(data / "pairs.train")[: job.reward.max_pairs]
    some = [*rows[:: max(1, len(rows) // MOST)]]
    some = [row for row in some if row.get("soft_label") is None or row["soft_label"] > 0.5]
    if job.reward.objectives or not some:
        checks.skip("reward.direction", "votes on objectives, or shares of votes, may contradict the labels")
    else:
        here = margins_of(model, tokenizer, some, job)
        loss = clustered_mean(np.logaddexp(0, here), (str(row["prompt"]) for row in some), level=1 - 1e-6)
        numbers = f"chosen scores higher in {(here > 0).mean():.3f} of {len(some)} training pairs, and the log loss "
        numbers += f"with labels exchanged is {loss.value:.3f} nats (a model that knows nothing has 0.693)"
        plain = job.reward.refresh is None and not any("source_weight" in row for row in some)  # else other rows decide
        checks.judge("reward.direction", not loss.high < 0.69, numbers, fails=plain)
    wrong = dict[str, list[str]]()
    for split, of_stage in margins.items():
        rows, step = read_split(data / f"pairs.{split}"), max(1, len(of_stage) // AGAIN)
        wrong[split] = []
        if len(rows) == len(of_stage):
            again = np.array([margins_of(model, tokenizer, [row], job)[0] for row in rows[::step]])
            off = float(np.median(np.abs(again - of_stage[::step]))) / max(float(of_stage.std()), 1e-12)
            wrong[split] += [f"margins are {off:.2g} deviations off those of pairs.{split}"] if off > allowed else []
        elif job.reward.refresh is None:  # it leaves out pairs with prompts of earlier runs
            wrong[split] += [f"{len(of_stage)} pairs were scored, and pairs.{split} has {len(rows)}"]
    d = margins["calibration"] / temperature
    slope = float((d * expit(-d)).mean())
    if abs(slope) > 1e-4 and not (temperature_at_end(temperature) and slope * math.log(temperature) < 0):
        wrong["calibration"] += [f"their log loss at the temperature {temperature:.4g} has the slope {slope:.2g}"]
    for name, value in (_expected(margins["test"] / temperature) | {"temperature": temperature}).items():
        if not math.isclose(metrics[f"reward/{name}"], value, rel_tol=1e-4, abs_tol=1e-6):
            wrong["test"] += [f"reward/{name} is {metrics[f'reward/{name}']:.4f}, and by the test margins {value:.4f}"]
    for split, name in (("test", "reward.test_pairs"), ("calibration", "reward.calibration")):
        numbers = f"{len(margins[split])} pairs of pairs.{split}, at the temperature {temperature:.3f}"
        checks.judge(name, not wrong[split], "; ".join(wrong[split]) or numbers)


def _expected(margins: FloatArray) -> dict[str, float]:
    right, confidence = (np.sign(margins) + 1) / 2, expit(np.abs(margins))
    bin_of = np.minimum((rankdata(confidence) - 0.5) / len(margins) * BINS, BINS - 1).astype(int)
    ece = sum(abs((confidence - right)[bin_of == place].sum()) for place in range(BINS)) / len(margins)
    return {"accuracy": float(right.mean()), "ece": ece, "log_loss": float(np.logaddexp(0, -margins).mean())}


def check_sft_scores(
    checks: SelfChecks, names: tuple[str, str], model: Any, tokenizer: Any, job: Any, data: Path, artifact: Path,
    scale: ScoreScale, config: EnsembleConfig, allowed: float,
) -> None:  # fmt: skip
    """Judge the scale by SFT's scores in the `artifact` of reward, and these by its answers to the calibration prompts.

    Args:
        names: of the check of the scale, and of that of the scores.
        job: a stage's, with `generation` and `runtime`.
        config: how `model` and `scale` combine the members' scores.
        allowed: median difference of the scores, in deviations. For PPO it warns up to `ROUNDED`, since the stage of
            reward may have computed in another number format.

    Raises:
        CheckFailed: `scale` or a score is another one.
    """
    stored = read_sft_scores(artifact)
    expected = combine(stored, stored.mean(1), config)
    shift, deviation = float(expected.mean()), float(expected.std())
    numbers = f"shift {scale.shift:.3f} and scale {scale.scale:.3f}, by the artifact's scores {shift:.3f} "
    off = max(abs(scale.shift - shift), abs(scale.scale - deviation))
    checks.judge(names[0], off <= 1e-3 * deviation, f"{numbers}and {deviation:.3f}")
    answers = SftAnswers.read(artifact)
    if answers is None:
        checks.skip(names[1], "release 0.1.0 stored no answers of SFT")
        return
    count = min(ANSWERS_SCORED, len(answers.ids), len(expected))
    rows = read_split(data / "prompts.calibration")[:count]
    if len(rows) < count:
        checks.skip(names[1], "SFT's answers are to other prompts than those of these data")
        return
    prompts = [encode_prompt(tokenizer, row["prompt"], job.generation.max_prompt_tokens) for row in rows]
    samples = answers.samples(slice(0, count), prompts, tokenizer, "cpu")
    sequences = [prompt + samples.reward_ids(i) for i, prompt in enumerate(prompts)]
    scores = score_sequences(model, tokenizer.pad_token_id, sequences, job.runtime).double()
    difference = float((scores - expected[:count]).abs().median()) / deviation
    numbers = f"{count} answers of SFT to prompts.calibration score {difference:.2g} standard deviations from their "
    numbers += f"stored scores, by median ({allowed:g} is allowed)"
    checks.judge(names[1], difference <= allowed, numbers, fails=difference > ROUNDED or names[0] == names[1])
