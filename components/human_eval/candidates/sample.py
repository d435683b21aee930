"""Candidates: responses of given models to given prompts at several temperatures, and pairs of them to label.

A reward model that learns from these pairs sees what PPO will show it. Nothing that is written depends on the order of
the prompts or of the models; torch is imported only where something has to be generated.
"""

import functools
import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from components.base.errors import UserError
from components.base.files import whole_folder
from components.base.hashing import digest_json
from components.base.jsonl import Message, write_json, write_rows
from components.data.formats.prompts import Prompts
from components.data.splits import prompt_key
from components.human_eval.candidates.config import CandidatesJob
from components.human_eval.candidates.labelling import PromptCandidates, make_pairs, write_pairs
from components.models.runtime import activate
from components.training.chunks import in_chunks

SUMMARY = "candidates.json"


class CandidateModel(NamedTuple):
    """A language model to sample from."""

    name: str
    """As the user named it."""
    digest: str
    folder: Path


class Arm(NamedTuple):
    """A model at a temperature."""

    model: CandidateModel
    temperature: float


class Drawn(NamedTuple):
    """A response as it was drawn, and by whom."""

    arm: Arm
    text: str
    ended: bool


class ArmResponses(TypedDict):
    """How many responses an arm gave, and how many of them ended."""

    model: str
    temperature: float
    responses: int
    ended: int


class CandidatesSummary(TypedDict):
    """`candidates.json`: `key` is of all that the bytes depend on; `sampled` counts before duplicates are merged."""

    key: str
    rows: int
    prompts: int
    quarantined: int
    models: list[dict[str, str]]
    sampled: list[ArmResponses]
    candidates: int
    duplicates: int
    pairs: int


def run(
    job: CandidatesJob,
    prompts: Prompts,
    models: Sequence[CandidateModel],
    key: str,
    work: Path,
    out: Path,
    observe: Callable[[int, int], None],
) -> CandidatesSummary:
    """Sample, choose pairs, and write the folder `out`, whole or not at all.

    `candidates.jsonl` holds every prompt with its responses and their models; `pairs.csv` and `pairs.jsonl` the blinded
    pairs; `key.jsonl` which response is on which side; `quarantine.jsonl` the rows without a prompt;
    `candidates.json` a summary.

    Args:
        key: of all that the bytes depend on; stands in the summary.
        work: where chunks of responses are kept until `out` is written: an interrupted call continues from there.
        observe: called with the responses done and those to come in all.

    Raises:
        UserError: a model can't be loaded, or its chat template refuses a prompt.
    """
    config = job.candidates
    chosen = in_drawn_order(prompts.distinct, job.seed)[: config.max_prompts]
    arms = arms_of(models, config.temperatures, job.seed)
    drawn = sample(job, chosen, arms, work, observe)
    candidates = [_candidate(prompt, responses) for prompt, responses in zip(chosen, drawn, strict=True)]
    pairs = make_pairs(candidates, config.pairs, config.max_characters, job.seed)
    kept = sum(len(each["responses"]) for each in candidates)
    summary: CandidatesSummary = {
        "key": key,
        "rows": prompts.rows,
        "prompts": len(chosen),
        "quarantined": len(prompts.quarantined),
        "models": [{"name": m.name, "digest": m.digest} for m in sorted(models)],
        "sampled": _by_arm(arms, drawn),
        "candidates": kept,
        "duplicates": config.per_prompt * len(chosen) - kept,
        "pairs": len(pairs),
    }
    with whole_folder(out) as folder:
        write_rows(folder / "candidates.jsonl", candidates)
        write_pairs(folder, pairs)
        quarantined = ({"row": row.number, "reasons": [p.text for p in row.problems]} for row in prompts.quarantined)
        write_rows(folder / "quarantine.jsonl", quarantined)
        write_json(folder / SUMMARY, summary)
    return summary


def finished(out: Path, key: str) -> CandidatesSummary | None:
    """The summary in `out` if it was written for `key`; None where there is none yet.

    Raises:
        UserError: `out` holds something else.
    """
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    try:
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        if summary["key"] == key:
            return summary
        what = "candidates of other prompts, models or options"
    except (OSError, ValueError, KeyError, TypeError):
        what = "something else"
    raise UserError(f"--out {out} holds {what} already. Name a new folder.")


def in_drawn_order(prompts: Sequence[list[Message]], seed: int) -> list[list[Message]]:
    """`prompts` by a hash of seed and prompt: whatever order they come in, they leave in the same one."""
    return sorted(prompts, key=lambda p: hashlib.sha256(f"candidates {seed} {prompt_key(p)}".encode()).digest())


def arms_of(models: Sequence[CandidateModel], temperatures: Sequence[float], seed: int) -> list[Arm]:
    """Every model at every temperature, in an order that keeps any stretch of it balanced.

    It runs along the diagonals of the table of models × temperatures. So any n arms in a row (the first follows the
    last) name each model n / models times to within one, and no temperature or model twice in n ≤ both their numbers
    but where one diagonal ends and the next begins.
    """
    rng = random.Random(f"candidates {seed} arms")
    models, temperatures = sorted(models, key=lambda m: m.digest), sorted(temperatures)
    rng.shuffle(models)
    rng.shuffle(temperatures)
    rows, columns = len(models), len(temperatures)
    diagonal = math.lcm(rows, columns)
    return [Arm(models[i % rows], temperatures[(i + i // diagonal) % columns]) for i in range(rows * columns)]


def allot(prompts: int, arms: int, per_prompt: int) -> list[Counter[int]]:
    """How many responses each prompt gets from each arm: `per_prompt` in all, to within one the same from each arm, for
    each prompt and for all of them together."""
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
    """The responses to each of `prompts`, `candidates.per_prompt` each, in the order of `arms`.

    A model is loaded when the first response of its own is missing in `work`, and let go before the next one is.
    """
    shares = allot(len(prompts), len(arms), job.candidates.per_prompt)
    by_length = sorted(range(len(prompts)), key=lambda i: sum(len(m["content"]) for m in prompts[i]))
    total = job.candidates.per_prompt * len(prompts)
    found: dict[tuple[Arm, int], list[Drawn]] = {}
    before = 0
    for model in dict.fromkeys(arm.model for arm in arms):
        load = functools.cache(functools.partial(_load, model, job))
        for n, arm in ((n, arm) for n, arm in enumerate(arms) if arm.model == model):
            wanted = [i for i in by_length for _ in range(shares[i][n])]
            rows = in_chunks(
                wanted,
                job.candidates.batch_size,
                work / f"{model.digest}-{arm.temperature!r}",
                functools.partial(_generate, job, arm, load, prompts),
                lambda done, before=before: observe(before + done, total),  # type: ignore[misc]
            )
            for i, row in zip(wanted, rows, strict=True):
                found.setdefault((arm, i), []).append(Drawn(arm, row["text"], row["ended"]))
            before += len(rows)
    return [[each for arm in arms for each in found.get((arm, i), [])] for i in range(len(prompts))]


def _load(model: CandidateModel, job: CandidatesJob) -> tuple[Any, Any]:
    from components.models.folders import load_base
    from components.models.matrices.kernels import by_onednn

    activate(job.runtime)
    loaded, tokenizer = load_base(model.folder, f"--model {model.name}", stop=job.generation.stop)
    return by_onednn(loaded.to(job.runtime.device)), tokenizer


def _generate(
    job: CandidatesJob,
    arm: Arm,
    load: Callable[[], tuple[Any, Any]],
    prompts: Sequence[list[Message]],
    chunk: Sequence[int],
    start: int,
) -> list[dict[str, Any]]:
    from jinja2 import TemplateError

    from components.models.sampling import generate_responses
    from components.training.loop import torch_seed

    model, tokenizer = load()
    # Each arm has random numbers of its own: shared ones would make like models give like responses.
    seed = torch_seed(job.seed, "candidates", arm.model.digest, arm.temperature, start)
    generation = job.generation.model_copy(update={"temperature": arm.temperature})
    try:
        responses = generate_responses(
            model, tokenizer, [prompts[i] for i in chunk], generation, seed, job.runtime, job.candidates.batch_size
        )
    except TemplateError as error:
        raise UserError(f"--model {arm.model.name}: its chat template refuses a prompt: {error}.") from error
    return [{"text": r.text, "ended": r.ended} for r in responses]


def _candidate(prompt: list[Message], responses: Sequence[Drawn]) -> PromptCandidates:
    """A prompt's row: identical responses (but for outer white space) stand there once, under who gave it first."""
    drawn = Counter(each.text.strip() for each in responses)
    first = {each.text.strip(): each for each in reversed(responses)}
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


def _by_arm(arms: Sequence[Arm], drawn: Sequence[Sequence[Drawn]]) -> list[ArmResponses]:
    """What each arm gave, before identical responses were put together."""
    ended = {arm: [each.ended for responses in drawn for each in responses if each.arm == arm] for arm in arms}
    return [
        {"model": arm.model.name, "temperature": arm.temperature, "responses": len(ends), "ended": sum(ends)}
        for arm, ends in sorted(ended.items())
    ]
