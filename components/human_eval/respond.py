"""A response of each model to each prompt, in chunks that survive an interruption."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.chunks import in_chunks
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
    total = len(SIDES) * len(prompts)

    def responses(side: str, before: int) -> list[dict[str, Any]]:
        load = functools.cache(lambda: _load(inputs[SIDES[side]], job))
        return in_chunks(
            prompts,
            job.human_eval.batch_size,
            out / "checkpoint" / "responses" / side,
            lambda chunk, start: _generate(job, load(), chunk, side, start),
            lambda done: report(before + done, {"human_eval/responses": float(before + done)}, total=total),
        )

    return {side: responses(side, n * len(prompts)) for n, side in enumerate(SIDES)}


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
