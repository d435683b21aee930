"""Candidates: responses of given models to given prompts at several temperatures, and pairs of them to label.

A reward model that learns from these pairs sees texts like those that PPO will show it. The output does not depend on
the order of the prompts or models. torch is imported only if something has to be generated.
"""

import functools
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.files import whole_folder
from components.base.hashing import digest_json
from components.base.jsonl import Message, write_json, write_rows
from components.data.formats.prompts import Prompts
from components.data.splits import prompt_key
from components.data.words import seen
from components.labelling.config import CandidatesJob
from components.labelling.pair_selection import PromptCandidates, make_pairs, write_pairs
from components.models.runtime import activate
from components.training.chunks import sample_in_chunks

SUMMARY = "candidates.json"


class CandidateModel(NamedTuple):
    """A language model to sample from."""

    name: str
    """The name that the user gave."""
    digest: str
    folder: Path


class Arm(NamedTuple):
    """A model at a temperature."""

    model: CandidateModel
    temperature: float


class Drawn(NamedTuple):
    """A sampled response and its model."""

    arm: Arm
    text: str
    ended: bool


def run(
    job: CandidatesJob,
    prompts: Prompts,
    models: Sequence[CandidateModel],
    key: str,
    work: Path,
    out: Path,
    observe: Callable[[int, int], None],
) -> dict[str, Any]:
    """Sample responses, choose pairs, and write the folder `out` atomically.

    `candidates.jsonl` has every prompt with its responses and their models; `pairs.csv` and `pairs.jsonl` the blinded
    pairs; `key.jsonl` the side of each response; `quarantine.jsonl` the rows without a prompt; `candidates.json` the
    summary that is returned, in which `sampled` counts each arm's responses with duplicates.

    Args:
        key: identifies everything on which the bytes depend; it is in the summary.
        work: the folder for chunks of responses until `out` is written; an interrupted call continues from there.
        observe: called with the number of responses done and the total.

    Raises:
        UserError: a model cannot be loaded, or its chat template refuses a prompt.
    """
    config = job.candidates
    chosen = in_drawn_order(prompts.distinct, job.seed)[: config.max_prompts]
    arms = arms_of(models, config.temperatures, job.seed)
    drawn = sample(job, chosen, arms, work, observe)
    candidates = [_candidate(prompt, responses) for prompt, responses in zip(chosen, drawn, strict=True)]
    pairs = make_pairs(candidates, config.pairs, config.max_characters, job.seed)
    different = sum(len(candidate["responses"]) for candidate in candidates)
    summary = {
        "key": key,
        "rows": prompts.rows,
        "prompts": len(chosen),
        "quarantined": len(prompts.quarantined),
        "models": [{"name": m.name, "digest": m.digest} for m in sorted(models)],
        "sampled": _by_arm(arms, drawn),
        "candidates": different,
        "duplicates": config.per_prompt * len(chosen) - different,
        "pairs": len(pairs),
    }
    with whole_folder(out) as folder:
        write_rows(folder / "candidates.jsonl", candidates)
        write_pairs(folder, pairs)
        quarantined = ({"row": row.number, "reasons": [p.text for p in row.problems]} for row in prompts.quarantined)
        write_rows(folder / "quarantine.jsonl", quarantined)
        write_json(folder / SUMMARY, summary)
    return summary


def finished(out: Path, key: str) -> dict[str, Any] | None:
    """Return the summary in `out` if it was written for `key`; None if there is none yet.

    Raises:
        UserError: `out` has something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        if summary["key"] == key:
            return dict(summary)
        what = "candidates of other prompts, models or options"
    except (OSError, ValueError, KeyError, TypeError):
        what = "something else"
    raise UserError(f"--out {out} holds {what} already. Name a new folder.")


def in_drawn_order(prompts: Sequence[list[Message]], seed: int) -> list[list[Message]]:
    """Return `prompts` ordered by a hash of seed and prompt, independent of their given order."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"candidates {seed} {prompt_key(p)}".encode()).digest())


def arms_of(models: Sequence[CandidateModel], temperatures: Sequence[float], seed: int) -> list[Arm]:
    """Return every model at every temperature (an arm), in an order of which any part is balanced.

    The order follows the diagonals of the table models × temperatures. So among any n consecutive arms (cyclically)
    each model occurs n / models times to within one. If n is at most the number of models and of temperatures, none
    occurs twice, except where one diagonal ends and the next begins.
    """
    rng = random.Random(f"candidates {seed} arms")
    models, temperatures = sorted(models, key=lambda m: m.digest), sorted(temperatures)
    rng.shuffle(models)
    rng.shuffle(temperatures)
    rows, columns = len(models), len(temperatures)
    diagonal = math.lcm(rows, columns)
    return [Arm(models[i % rows], temperatures[(i + i // diagonal) % columns]) for i in range(rows * columns)]


def allot(prompts: int, arms: int, per_prompt: int) -> list[Counter[int]]:
    """Return how many responses each prompt gets from each arm, `per_prompt` in total.

    The numbers per arm differ by at most one, for each prompt and over all prompts.
    """
    every, rest = divmod(per_prompt, arms)
    return [
        Counter(dict.fromkeys(range(arms), every)) + Counter((place * rest + n) % arms for n in range(rest))
        for place in range(prompts)
    ]


def sample(
    job: CandidatesJob,
    prompts: Sequence[list[Message]],
    arms: Sequence[Arm],
    work: Path,
    observe: Callable[[int, int], None],
) -> list[list[Drawn]]:
    """Sample `candidates.per_prompt` responses to each of `prompts`, in the order of `arms`.

    A model is loaded only if one of its responses is missing in `work`, and freed before the next one is loaded.
    """
    from jinja2 import TemplateError

    shares = allot(len(prompts), len(arms), job.candidates.per_prompt)
    by_length = sorted(range(len(prompts)), key=lambda i: sum(len(m["content"]) for m in prompts[i]))
    total = job.candidates.per_prompt * len(prompts)
    by_arm: dict[tuple[Arm, int], list[Drawn]] = {}
    before = 0
    for model in dict.fromkeys(arm.model for arm in arms):
        load = functools.cache(functools.partial(_load, model, job))
        for n, arm in ((n, arm) for n, arm in enumerate(arms) if arm.model == model):
            wanted = [i for i in by_length for _ in range(shares[i][n])]
            generation = job.generation.model_copy(update={"temperature": arm.temperature})
            try:
                rows = sample_in_chunks(
                    load, [prompts[i] for i in wanted], generation, job.runtime,
                    (job.seed, "candidates", model.digest, arm.temperature), job.candidates.batch_size,
                    work / f"{model.digest}-{arm.temperature!r}",
                    lambda done, before=before: observe(before + done, total),  # type: ignore[misc]
                )  # fmt: skip
            except TemplateError as error:
                raise UserError(f"--model {model.name}: its chat template refuses a prompt: {error}.") from error
            for i, row in zip(wanted, rows, strict=True):
                by_arm.setdefault((arm, i), []).append(Drawn(arm, row["text"], row["ended"]))
            before += len(rows)
    return [[response for arm in arms for response in by_arm.get((arm, i), [])] for i in range(len(prompts))]


def _load(model: CandidateModel, job: CandidatesJob) -> tuple[Any, Any]:
    from components.models.folders import load_base
    from components.models.matrices.kernels import by_onednn

    activate(job.runtime)
    loaded, tokenizer = load_base(model.folder, f"--model {model.name}", stop=job.generation.stop, trained=False)
    return by_onednn(loaded.to(job.runtime.device)), tokenizer


def _candidate(prompt: list[Message], responses: Sequence[Drawn]) -> PromptCandidates:
    """Return a prompt's row. Responses that look the same, up to outer white space, are listed once, under the first
    author."""
    drawn = Counter(seen(response.text).strip() for response in responses)
    first = {seen(response.text).strip(): response for response in reversed(responses)}
    name = digest_json(prompt)[:16]
    return {
        "id": name,
        "prompt": prompt,
        "responses": [
            {"id": f"{name}-{n}", "text": first[text].text, "model": first[text].arm.model.name,
             "model_digest": first[text].arm.model.digest, "temperature": first[text].arm.temperature,
             "ended": first[text].ended, "drawn": drawn[text]}
            for n, text in enumerate(drawn, 1)
        ],
    }  # fmt: skip


def _by_arm(arms: Sequence[Arm], drawn: Sequence[Sequence[Drawn]]) -> list[dict[str, Any]]:
    """Return what each arm produced, before identical responses were merged."""
    ended = {arm: [r.ended for responses in drawn for r in responses if r.arm == arm] for arm in arms}
    return [
        {"model": arm.model.name, "temperature": arm.temperature, "responses": len(ends), "ended": sum(ends)}
        for arm, ends in sorted(ended.items())
    ]
