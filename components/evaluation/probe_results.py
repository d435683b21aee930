"""The sub-stages `evaluation.sft_probes` and `evaluation.policy_probes`: one model's responses to probes, judged."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.base.jsonl import write_rows
from components.base.observe import Observe
from components.data.inputs import kind_of
from components.evaluation.config import RESPONSES, ProbesJob
from components.evaluation.probe_prompts import judge, read_probe
from components.training.chunks import sample_in_chunks

PROBES = "probes"
"""Inputs with a probe's file: `probes/NAME`."""


def run(job: ProbesJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Answer the prompts of each probe of `inputs["probes/..."]` with the model of `inputs["model"]`, and judge them.

    `artifact/responses.jsonl` has a row for each prompt: `probe`, `id`, `category`, `prompt` (messages), `response`,
    `violation` and the `rule` that decided. Both models' sampled responses share their random numbers, so that equal
    models give equal responses. Finished chunks of prompts are in `out/checkpoint/`.

    Raises:
        UserError: a probe's file is damaged.
    """
    probes = [read_probe(inputs[name]) for name in sorted(inputs) if kind_of(name) == PROBES]
    total, before, rows = sum(len(probe.prompts) for probe in probes), 0, list[dict[str, Any]]()
    greedy = {"temperature": 0.0} if job.evaluation.sampling == "greedy" else {}
    generation = job.generation.model_copy(update=greedy)

    @functools.cache
    def load() -> tuple[Any, Any]:
        from components.models.folders import load_causal_lm

        return load_causal_lm(inputs["model"], job.runtime)

    def done(count: int) -> None:
        observe(before + count, {"evaluation/responses": float(before + count)}, total=total)

    for probe in probes:
        texts = sample_in_chunks(
            load, [prompt.conversation for prompt in probe.prompts], generation, job.runtime,
            (job.seed, "evaluation", probe.name), job.evaluation.batch_size,
            out / "checkpoint" / PROBES / probe.name, done,
        )  # fmt: skip
        before += len(texts)
        responses = {prompt.id: text["text"] for prompt, text in zip(probe.prompts, texts, strict=True)}
        rows += [
            {"probe": probe.name, "id": prompt.id, "category": prompt.category, "prompt": prompt.conversation,
             "response": responses[prompt.id], "violation": verdict.violation, "rule": verdict.rule}
            for prompt, verdict in zip(probe.prompts, judge(probe, responses), strict=True)
        ]  # fmt: skip
    write_rows(out / "artifact" / RESPONSES, rows)
    return {"evaluation/probe_prompts": float(total)}
