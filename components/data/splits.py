"""Splits by prompt: where a prompt goes depends on its own words, never on other rows, their order or the seed."""

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from components.base.hashing import canonical_json
from components.data.config import SplitConfig
from components.data.rows import CanonicalRow, Message

T = TypeVar("T")

SPLITS = ("train", "calibration", "test")


def prompt_key(prompt: Sequence[Message]) -> str:
    """Canonical JSON of a prompt's messages: what makes two prompts the same prompt."""
    return canonical_json(prompt)


def split_of(key: str, shares: SplitConfig) -> str:
    """The split of a prompt, by its key: u = the first 8 bytes of sha256("split" + key) / 2^64, cut at the shares."""
    digest = hashlib.sha256(("split" + key).encode("utf-8", "surrogatepass")).digest()
    u = int.from_bytes(digest[:8], "big") / 2**64
    if u < shares.train:
        return "train"
    return "calibration" if u < shares.train + shares.calibration else "test"


def standing(groups: Mapping[str, Iterable[CanonicalRow]]) -> dict[str, set[str]]:
    """For each prompt's key the names of the groups (of rows) that it stands in; more than one split is a leak."""
    out: dict[str, set[str]] = {}
    for name, items in groups.items():
        for item in items:
            out.setdefault(prompt_key(item["prompt"]), set()).add(name)
    return out


def loose_key(prompt: Sequence[Message]) -> str:
    """A prompt's words and digits alone, folded: near-duplicates (case, punctuation, white space) share it."""
    return "\n".join(" ".join(re.findall(r"\w+", m["content"].casefold())) for m in prompt)


def choose(items: Sequence[T], key: Callable[[T], str], most: int | None, seed: int) -> list[T]:
    """At most `most` of `items`, in their order: those whose `key` hashes lowest, whatever their positions."""
    if most is None or len(items) <= most:
        return list(items)
    rank = sorted(range(len(items)), key=lambda i: hashlib.sha256(f"{seed} {key(items[i])}".encode()).digest())
    return [items[i] for i in sorted(rank[:most])]
