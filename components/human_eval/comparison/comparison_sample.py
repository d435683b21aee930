"""The first half of a comparison: several models answer held-out prompts, and people get pairs of the answers."""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from components.base.jsonl import write_json, write_rows
from components.base.observe import Observe
from components.data.words import seen
from components.human_eval.blinded_sample import check_judges, held_out_prompts, write_blinded
from components.human_eval.blinding import blind
from components.human_eval.comparison.model_pairs import MODELS, ComparedItem, model_inputs
from components.human_eval.config import SampleJob
from components.human_eval.respond import respond
from components.human_eval.selection import Chosen, choose


class _Pair(NamedTuple):
    """Two models (numbers from 0) on the prompt `place`."""

    place: int
    first: int
    second: int


def run(job: SampleJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Let the models `inputs["model_1"]` to `inputs["model_k"]` answer prompts of `inputs["data"]`; write a sheet.

    The artifact has the format of `components.human_eval.blinded_sample`, so the same code gives out, reads and joins
    its sheets. An item's `sft` is its first model's response, `policy` its second's. `models.json`, as secret as
    `key.json`, tells which two models an item compares. For every two models, sides are balanced to within one.

    Raises:
        UserError: as for `components.human_eval.blinded_sample.run`.
    """
    config, artifact = job.human_eval, out / "artifact"
    check_judges(config, inputs["data"])
    chosen = choose(held_out_prompts(inputs["data"]), config, job.seed)
    names = model_inputs(inputs)
    responses = respond(job, inputs, [c.prompt for c in chosen], out, observe, {name: name for name in names})
    texts = [[r["text"] for r in responses[name]] for name in names]
    pairs = paired(chosen, len(names), config.pairs == "all", job.seed)
    # Sides are balanced within a stratum: here the items of one stratum that compare the same two models.
    strata = [f"{chosen[p.place].stratum}\0{p.first}-{p.second}" for p in pairs]
    pair_prompts = [chosen[p.place]._replace(stratum=stratum) for p, stratum in zip(pairs, strata, strict=True)]
    first = [texts[p.first][p.place] for p in pairs]
    second = [texts[p.second][p.place] for p in pairs]
    key = inputs["seal"].read_bytes() if config.judges == "people" else b""
    items, salt = blind(pair_prompts, first, second, job.seed, key, round(config.repeats * len(pairs)))
    compared: list[ComparedItem] = []
    for item in items:
        stratum, _, numbers = item.chosen.stratum.partition("\0")
        i, j = (int(n) for n in numbers.split("-"))
        compared.append({
            "item": item.item, "stratum": stratum, "category": item.chosen.category, "prompt": item.chosen.prompt,
            "sft": item.sft, "policy": item.policy, "models": [i, j],
        })  # fmt: skip
    write_json(artifact / MODELS, {"models": len(names), "of": {c["item"]: c["models"] for c in compared}})
    write_rows(artifact / "responses.jsonl", compared)
    write_blinded(artifact, items, salt, config, job.seed)
    return {
        "human_eval/sampled": float(len(pairs)),
        "human_eval/prompts": float(len(chosen)),
        "human_eval/repeated": float(len(items) - len(pairs)),
        "human_eval/models": float(len(names)),
        "human_eval/identical": sum(map(str.__eq__, map(seen, first), map(seen, second))) / len(pairs),
        **{f"human_eval/{name}_ended": sum(r["ended"] for r in responses[name]) / len(chosen) for name in names},
    }


def paired(chosen: Sequence[Chosen], models: int, every: bool, seed: int) -> list[_Pair]:
    """Choose the models to compare on each prompt: every pair of models, or one random pair per prompt.

    One per prompt is balanced: over all prompts each pair of models occurs equally often to within one, and nearly so
    within a stratum. The choice depends only on the seed and the prompts.
    """
    twos = list(itertools.combinations(range(models), 2))
    if every:
        return [_Pair(place, *two) for place in range(len(chosen)) for two in twos]
    order = sorted(
        range(len(chosen)), key=lambda place: chosen[place].stratum
    )  # a stable sort: keeps the rank within a stratum
    drawn = random.Random(f"{seed} pairs")
    out = []
    for start in range(0, len(order), len(twos)):
        for place, two in zip(order[start : start + len(twos)], drawn.sample(twos, len(twos)), strict=False):
            out.append(_Pair(place, *two))
    return sorted(out)
