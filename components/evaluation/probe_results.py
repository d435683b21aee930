"""The sub-stages `evaluation.sft_probes` and `evaluation.policy_probes`: one model's responses to probes, judged."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from components.base.jsonl import write_rows
from components.base.observe import Observe
from components.data.inputs import kind_of
from components.evaluation.config import JUDGE, RESPONSES, ProbesJob
from components.evaluation.probe_judge import ProbeJudge
from components.evaluation.probe_prompts import Probe, read_probe, verdict
from components.labelling.feedback.judges import EndpointJudge, FolderJudge
from components.training.chunks import sample_in_chunks

PROBES = "probes"
"""Inputs with a probe's file: `probes/NAME`."""


def run(job: ProbesJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Answer the prompts of each probe of `inputs["probes/..."]` with the model of `inputs["model"]`, and judge them.

    `artifact/responses.jsonl` has a row for each prompt: `probe`, `id`, `category`, `prompt` (messages), `response`,
    `violation` and the `rule` that decided. Both models' sampled responses share their random numbers, so that equal
    models give equal responses. Finished chunks of prompts are in `out/checkpoint/`.

    With a judge (`inputs["judge"]` or `evaluation.judge_endpoint`), `rule` is `judge` where it decided, and `by_rule`
    has the rule's verdict. Its agreement with people's labels is a metric. `out/checkpoint/` has its answers too.

    Raises:
        UserError: a probe's file is damaged, or the judge can't be used. Unreachable: the judge does not answer.
    """
    probes = [read_probe(inputs[name]) for name in sorted(inputs) if kind_of(name) == PROBES]
    total, before, answered = sum(len(probe.prompts) for probe in probes), 0, list[list[str]]()
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
        answered.append([text["text"] for text in texts])
    load.cache_clear()
    metrics, rows = {"evaluation/probe_prompts": float(total)}, list[dict[str, Any]]()
    with _judge(job, inputs, out / "checkpoint" / JUDGE) as by_model:
        for probe, responses in zip(probes, answered, strict=True):
            for row in _rows(probe, responses, by_model):
                rows.append(row)
                if by_model is not None:
                    observe(len(rows), {}, total=total, doing="asking the judge")
            if by_model is not None and (agreement := by_model.agreement(probe)).responses:
                name = f"evaluation/judge_{{}}_of_probe_from/{probe.name}".format
                metrics |= {name(field): float(value) for field, value in agreement._asdict().items()}
    write_rows(out / "artifact" / RESPONSES, rows)
    return metrics


def _judge(job: ProbesJob, inputs: Mapping[str, Path], answers: Path) -> AbstractContextManager[ProbeJudge | None]:
    if (endpoint := job.evaluation.judge_endpoint) is not None:
        return ProbeJudge(answers, lambda: EndpointJudge(endpoint, "evaluation.judge_endpoint"))
    if (folder := inputs.get(JUDGE)) is None:
        return nullcontext()
    folder = folder / "model" if (folder / "model").is_dir() else folder
    return ProbeJudge(answers, lambda: FolderJudge(folder, job.runtime, "evaluation.judge"))


def _rows(probe: Probe, responses: Sequence[str], by_model: ProbeJudge | None) -> Iterator[dict[str, Any]]:
    """Yield the row of `responses.jsonl` of each prompt."""
    for prompt, response in zip(probe.prompts, responses, strict=True):
        by_rule = verdict(probe, prompt, response)
        row = {"probe": probe.name, "id": prompt.id, "category": prompt.category, "prompt": prompt.conversation,
               "response": response, **by_rule._asdict()}  # fmt: skip
        if by_model is not None:
            row["by_rule"] = by_rule.violation
            if (violates := by_model.violates(probe, prompt, response)) is not None:
                row |= {"violation": violates, "rule": "judge"}
        yield row
