"""Choose the held-out prompts to judge: a stratified sample that depends only on the seed and the set of prompts."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NotRequired, TypedDict

from components.base.hashing import canonical_json
from components.base.jsonl import Message
from components.human_eval.config import HumanEvalConfig

LENGTH_STRATA = 4
"""Number of strata of equal size into which prompts, or a category's prompts, are divided by length."""


class HeldOutPrompt(TypedDict):
    """A row of a validate artifact's `prompts.test`."""

    prompt: list[Message]
    category: NotRequired[str | None]


class Chosen(NamedTuple):
    """A sampled prompt (messages) and its stratum."""

    prompt: list[Message]
    category: str | None
    stratum: str


def choose(rows: Sequence[HeldOutPrompt], config: HumanEvalConfig, seed: int) -> list[Chosen]:
    """Choose at most `config.items` of `rows`, from each stratum in proportion to its size.

    A prompt's rank in its stratum is a hash of seed and prompt, so the order of `rows` has no effect.
    """
    members: dict[str, list[int]] = {}
    for index, name in enumerate(strata(rows, config)):
        members.setdefault(name, []).append(index)
    sizes = {name: len(members[name]) for name in sorted(members)}
    chosen = []
    for name, count in allocate(sizes, min(config.items, len(rows))).items():
        ranked = sorted(members[name], key=lambda index: _rank(seed, rows[index]["prompt"]))
        chosen += [Chosen(rows[i]["prompt"], rows[i].get("category"), name) for i in ranked[:count]]
    return chosen


def strata(rows: Sequence[HeldOutPrompt], config: HumanEvalConfig) -> list[str]:
    """Return the name of each row's stratum. If strata are categories, a row without one is in the stratum `none`."""
    kind = config.strata
    if kind == "auto":
        kind = "category" if all(row.get("category") for row in rows) else "length"
    if kind == "none":
        return ["all"] * len(rows)
    categories = [row.get("category") or "none" for row in rows]
    if kind == "category":
        return categories
    if kind == "length":
        return _by_length(rows, LENGTH_STRATA)
    names = [""] * len(rows)
    for category in set(categories):
        places = [index for index, of in enumerate(categories) if of == category]
        lengths = _by_length([rows[index] for index in places], LENGTH_STRATA)
        for index, length in zip(places, lengths, strict=True):
            names[index] = f"{category}, {length}"
    return names


def _by_length(rows: Sequence[HeldOutPrompt], parts: int) -> list[str]:
    """Divide `rows` into parts of equal size by their prompts' characters; return the name of each row's part."""
    lengths = [sum(len(m["content"]) for m in row["prompt"]) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], canonical_json(rows[i]["prompt"])))
    names = [""] * len(rows)
    for place, index in enumerate(order):
        names[index] = f"length {place * parts // len(rows) + 1} of {parts}"
    return names


def allocate(sizes: Mapping[str, int], items: int) -> dict[str, int]:
    """Distribute `items` over strata in proportion to their sizes, by largest remainder, up to each stratum's size."""
    total = sum(sizes.values())
    counts = {name: items * size // total for name, size in sizes.items()}
    remainders = sorted(sizes, key=lambda name: (-(items * sizes[name] % total), name))
    for name in remainders[: items - sum(counts.values())]:
        counts[name] += 1
    return counts


def _rank(seed: int, prompt: list[Message]) -> bytes:
    return hashlib.sha256(f"human_eval {seed} {canonical_json(prompt)}".encode()).digest()
