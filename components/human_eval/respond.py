"""Sample a response of each model to each prompt, in chunks that survive an interruption."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.human_eval.config import SampleJob
from components.training.chunks import sample_in_chunks

SIDES = {"sft": "sft", "policy": "ppo"}
"""Maps a response's author to the stage's input with its model."""


def respond(
    job: SampleJob,
    inputs: Mapping[str, Path],
    prompts: Sequence[Any],
    out: Path,
    observe: Observe,
    sides: Mapping[str, str] = SIDES,
    then: Callable[[Any, Any, Sequence[dict[str, Any]]], None] | None = None,
) -> dict[str, list[dict[str, Any]]]:
    """Return `{"sft": [...], "policy": [...]}`: for each prompt a row of `sample_in_chunks`.

    `sides` names other authors, each with the input of its model. A chunk is `human_eval.batch_size` prompts with its
    own seed; it is written to `out/checkpoint/` when done. Finished chunks are not generated again, so an interrupted
    run ends with the same responses. `then` is called after each author's responses, with the model, its tokenizer and
    the rows.
    """
    total = len(sides) * len(prompts)
    ready, begun = 0, False

    @functools.lru_cache(maxsize=1)
    def load(side: str) -> tuple[Any, Any]:
        nonlocal begun
        if ready and not begun:
            observe(ready, {}, total=total, resumed=True)
        begun = True
        return _load(inputs[sides[side]], job)

    def responses(side: str, before: int) -> list[dict[str, Any]]:
        def done(rows: int) -> None:
            nonlocal ready
            ready = before + rows
            observe(ready, {"human_eval/responses": float(ready)}, total=total)

        rows = sample_in_chunks(
            functools.partial(load, side), prompts, job.generation, job.runtime, (job.seed, "human_eval", side),
            job.human_eval.batch_size, out / "checkpoint" / "responses" / side, done,
        )  # fmt: skip
        if then is not None:
            then(*load(side), rows)
        return rows

    return {side: responses(side, n * len(prompts)) for n, side in enumerate(sides)}


def _load(folder: Path, job: SampleJob) -> tuple[Any, Any]:
    from components.models.folders import load_causal_lm

    return load_causal_lm(folder, job.runtime)
