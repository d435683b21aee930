"""Score the pairs that people judge with the reward model, to measure the agreement once the labels arrive.

It reads only what a rater sees. So it can score any two models' responses, without knowing which model wrote which.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.jsonl import read_rows, write_json, write_rows
from components.base.observe import Observe
from components.gates.self_checks import SelfChecks
from components.models.batching import encode_prompt, encode_response
from components.models.chat.templates import FIXED
from components.reward.config import SheetScoresJob
from components.reward.scoring import ScoreScale, load_scorer, score_sequences

SCORES = "scores.jsonl"
"""A line for each item of the sheet: `item`, and the raw scores `a` and `b` of its two responses."""
CHECKED = 4
"""Items whose responses are scored again, one by one."""


def run(job: SheetScoresJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Score both responses of every item of `inputs["sample"]` with the reward model of `inputs["reward"]`.

    Attention checks are left out: they have no line in `responses.jsonl`, because no model wrote their wrong reply.
    Responses are encoded like those of held-out pairs. For several members the score is their mean, for which the
    temperature was fitted. `artifact/` gets `scores.jsonl`, and `scores.json` with that temperature: a difference of
    scores divided by it is the reward model's log-odds.
    """
    model, tokenizer = load_scorer(inputs["reward"], job.runtime)
    prompts = {row["item"]: row["prompt"] for row in read_rows(inputs["sample"] / "responses.jsonl")}
    sheet = {row["item"].split("-")[0]: row for row in read_rows(inputs["sample"] / "sheet.jsonl")}
    items = [item for item in sheet if item in prompts]
    sequences = []
    for item in items:
        row = sheet[item]
        prompt = encode_prompt(tokenizer, prompts[item], job.generation.max_prompt_tokens)
        for side in ("response_a", "response_b"):
            sequences.append(prompt + encode_response(tokenizer, row[side], job.generation.max_new_tokens))
    scores = score_sequences(model, tokenizer.pad_token_id, sequences, job.runtime).reshape(-1, 2).tolist()
    write_rows(
        out / "artifact" / SCORES,
        ({"item": item, "a": a, "b": b} for item, (a, b) in zip(items, scores, strict=True)),
    )
    write_json(out / "artifact" / "scores.json", {"temperature": ScoreScale.read(inputs["reward"]).temperature})
    checks = SelfChecks()
    _check_scores(checks, [(prompts[item], sheet[item]) for item in items], model, tokenizer, job, inputs, out)
    checks.write(out)
    metrics = {"human_eval/scored_by_reward": float(len(items))}
    observe(len(items), metrics, total=len(items))
    return metrics


def _check_scores(
    checks: SelfChecks, rows: Sequence[tuple[Any, Mapping[str, str]]], model: Any, tokenizer: Any, job: SheetScoresJob,
    inputs: Mapping[str, Path], out: Path,
) -> None:  # fmt: skip
    """Score a few responses alone, encoded by the tokenizer's own template, and compare with the written scores."""
    written, limits = [*read_rows(out / "artifact" / SCORES)], job.generation
    largest, scale = 0.0, ScoreScale.read(inputs["reward"])
    for (prompt, row), scores in zip(rows[:CHECKED], written, strict=False):
        text = tokenizer.apply_chat_template(list(prompt), tokenize=False, add_generation_prompt=True, **FIXED)
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(before) > limits.max_prompt_tokens:
            continue
        for side in ("a", "b"):
            ids = before + encode_response(tokenizer, row[f"response_{side}"], limits.max_new_tokens)
            alone = float(score_sequences(model, tokenizer.pad_token_id, [ids], job.runtime)[0])
            largest = max(largest, abs(alone - scores[side]) / scale.scale)
    temperature = json.loads((out / "artifact" / "scores.json").read_text(encoding="utf-8"))["temperature"]
    numbers = f"scores of a prompt and one side differ by up to {largest:.2g} deviations from the written ones; the "
    numbers += f"temperature is {temperature:g}, and that of the reward model {scale.temperature:g}"
    allowed = 0.01 if job.runtime.dtype == "float32" and not job.runtime.tf32 else 0.5
    checks.judge("human_eval.scores", largest <= allowed and temperature == scale.temperature, numbers)
