"""Score the pairs that people judge with the reward model, to measure the agreement once the labels arrive.

It reads only what a rater sees. So it can score any two models' responses, without knowing which model wrote which.
"""

from collections.abc import Mapping
from pathlib import Path

from components.base.jsonl import read_rows, write_json, write_rows
from components.base.observe import Observe
from components.models.batching import encode_prompt, encode_response
from components.reward.config import SheetScoresJob
from components.reward.scoring import ScoreScale, load_scorer, score_sequences

SCORES = "scores.jsonl"
"""A line for each item of the sheet: `item`, and the raw scores `a` and `b` of its two responses."""


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
    metrics = {"human_eval/scored_by_reward": float(len(items))}
    observe(len(items), metrics, total=len(items))
    return metrics
