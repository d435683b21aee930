"""A response of each model to each prompt, in chunks that survive an interruption."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.data.jsonl import write_json
from components.human_eval.config import SampleJob

SIDES = {"sft": "sft", "policy": "ppo"}
"""A response's author and the input that holds its model."""


def respond(
    job: SampleJob, inputs: Mapping[str, Path], prompts: Sequence[Any], out: Path, report: Any
) -> dict[str, list[dict[str, Any]]]:
    """`{"sft": [...], "policy": [...]}`, each one {text, ended} a prompt, in the order of `prompts` (messages).

    A chunk is `human_eval.batch_size` prompts with a seed of its own, written to `out/checkpoint/` when done: what is
    there is not generated again, and an interrupted run ends with the same responses.
    """
    size = job.human_eval.batch_size
    starts = range(0, len(prompts), size)
    found: dict[str, list[dict[str, Any]]] = {}
    for side, source in SIDES.items():
        chunks = [out / "checkpoint" / "responses" / f"{side}-{start:06d}.json" for start in starts]
        loaded = None
        found[side] = []
        for start, file in zip(starts, chunks, strict=True):
            if not file.exists():
                loaded = loaded or _load(inputs[source], job)
                _save(file, _generate(job, loaded, prompts[start : start + size], side, start))
            found[side] += json.loads(file.read_text(encoding="utf-8"))
            done = sum(map(len, found.values()))
            report(done, {"human_eval/responses": float(done)}, total=len(SIDES) * len(prompts))
    return found


def _load(folder: Path, job: SampleJob) -> tuple[Any, Any]:
    from components.models import load_causal_lm

    return load_causal_lm(folder, job.runtime)


def _generate(
    job: SampleJob, loaded: tuple[Any, Any], prompts: Sequence[Any], side: str, start: int
) -> list[dict[str, Any]]:
    from components.ppo.rollout import generate_responses
    from components.training import torch_seed

    model, tokenizer = loaded
    # Each author has random numbers of its own: shared ones would make like models give like responses.
    seed = torch_seed(job.seed, "human_eval", side, start)
    responses = generate_responses(
        model, tokenizer, prompts, job.generation, seed, job.runtime, batch_size=job.human_eval.batch_size
    )
    return [{"text": r.text, "ended": r.ended} for r in responses]


def _save(file: Path, responses: list[dict[str, Any]]) -> None:
    unfinished = file.with_suffix(".unfinished")
    write_json(unfinished, responses)
    os.replace(unfinished, file)
