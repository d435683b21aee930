"""Sample a response of each model to each prompt, in chunks that survive an interruption."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.human_eval.config import SampleJob
from components.training.chunks import in_chunks

SIDES = {"sft": "sft", "policy": "ppo"}
"""Maps a response's author to the stage's input with its model."""


def respond(
    job: SampleJob,
    inputs: Mapping[str, Path],
    prompts: Sequence[Any],
    out: Path,
    observe: Observe,
    sides: Mapping[str, str] = SIDES,
) -> dict[str, list[dict[str, Any]]]:
    """Return `{"sft": [...], "policy": [...]}`: one answer per prompt, in the order of `prompts` (messages).

    An answer has its `text`, and `ended` says whether it ended before the cap.
    `sides` names other authors, each with the input of its model. A chunk is `human_eval.batch_size` prompts with its
    own seed; it is written to `out/checkpoint/` when done. Finished chunks are not generated again, so an interrupted
    run ends with the same responses.
    """
    total = len(sides) * len(prompts)
    begun = False

    def responses(side: str, before: int) -> list[dict[str, Any]]:
        load = functools.cache(lambda: _load(inputs[sides[side]], job))

        def generate(chunk: Sequence[Any], start: int) -> list[dict[str, Any]]:
            nonlocal begun
            if not begun and before + start:
                observe(before + start, {}, total=total, resumed=True)
            begun = True
            return _generate(job, load(), chunk, side, start)

        return in_chunks(
            prompts,
            job.human_eval.batch_size,
            out / "checkpoint" / "responses" / side,
            generate,
            lambda done: observe(before + done, {"human_eval/responses": float(before + done)}, total=total),
        )

    return {side: responses(side, n * len(prompts)) for n, side in enumerate(sides)}


def _load(folder: Path, job: SampleJob) -> tuple[Any, Any]:
    from components.models.folders import load_causal_lm

    return load_causal_lm(folder, job.runtime)


def _generate(
    job: SampleJob, loaded: tuple[Any, Any], prompts: Sequence[Any], side: str, start: int
) -> list[dict[str, Any]]:
    from components.models.sampling import generate_responses
    from components.training.loop import torch_seed

    model, tokenizer = loaded
    # Each author has its own random numbers; shared ones would make similar models give similar responses.
    seed = torch_seed(job.seed, "human_eval", side, start)
    responses = generate_responses(
        model, tokenizer, prompts, job.generation, seed, job.runtime, batch_size=job.human_eval.batch_size
    )
    return [{"text": r.text, "ended": r.ended} for r in responses]
