"""Score the pairs that people judge with the reward model, to measure the agreement once the labels arrive.

It reads only what a rater sees. So it can score any two models' responses, without knowing which model wrote which.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from components.base.jsonl import read_rows, write_json, write_rows
from components.base.observe import Observe
from components.gates.self_checks import SelfChecks
from components.models.batching import encode_prompt, encode_response
from components.reward.config import SheetScoresJob
from components.reward.scoring import ScoreScale, load_scorer, score_sequences

SCORES = "scores.jsonl"
"""A line for each item of the sheet: `item`, and the raw scores `a` and `b` of its two responses."""

AGAIN, ALLOWED = 16, 0.1
"""Items of which the self-check scores the replies again, and by how many deviations of SFT's scores they may differ:
other batches round otherwise."""


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
    _check(job, inputs, out / "artifact", model, tokenizer)
    metrics = {"human_eval/scored_by_reward": float(len(items))}
    observe(len(items), metrics, total=len(items))
    return metrics


def _check(job: SheetScoresJob, inputs: Mapping[str, Path], artifact: Path, model: Any, tokenizer: Any) -> None:
    """Score some replies again, each alone under its own prompt, on the side that the key says.

    Raises:
        CheckFailed: their scores are others, by median.
    """
    scale, key = ScoreScale.read(inputs["reward"]), json.loads((inputs["sample"] / "key.json").read_text())
    stored = {row["item"]: row for row in read_rows(artifact / SCORES)}
    rows, off = [row for row in read_rows(inputs["sample"] / "responses.jsonl") if row["item"] in stored], list[float]()
    for row in rows[:: max(1, len(rows) // AGAIN)]:
        prompt = encode_prompt(tokenizer, row["prompt"], job.generation.max_prompt_tokens)
        side = key["policy_side"][row["item"]]
        for author, at in (("policy", side), ("sft", "b" if side == "a" else "a")):
            alone = prompt + encode_response(tokenizer, row[author], job.generation.max_new_tokens)
            score = float(score_sequences(model, tokenizer.pad_token_id, [alone], job.runtime).reshape(-1)[0])
            off.append(abs(score - stored[row["item"]][at]) / scale.scale)
    temperature = json.loads((artifact / "scores.json").read_text())["temperature"]
    difference = median(off) if off else 0.0
    numbers = (
        f"{len(off)} replies alone under their own prompt have other scores by {difference:.2g} deviations ({ALLOWED} "
        f"is allowed), and the temperature is {temperature:.3g}, in the artifact of reward {scale.temperature:.3g}"
    )
    SelfChecks().judge("human_eval.scores", difference <= ALLOWED and temperature == scale.temperature, numbers)
