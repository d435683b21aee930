"""Which side the policy stands on, in what order items come, and the sealed key to both.

All draws come from a digest of the responses *with their authors*, so that they can be repeated by who holds the
artifact, and not by a rater who reads the seed in a profile.
"""

import random
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypedDict

from components.base.hashing import digest_json
from components.base.jsonl import Message
from components.human_eval.selection import Chosen

Side = Literal["a", "b"]


class Item(NamedTuple):
    """A pair to judge, as who holds the key knows it."""

    item: str
    """Its number on the sheet, `q0001`."""
    chosen: Chosen
    sft: str
    policy: str
    policy_side: Side


class SealedKey(TypedDict):
    """`key.json`."""

    note: str
    policy_side: dict[str, Side]
    """By item."""
    salt: str


class JudgedItem(TypedDict):
    """A line of `responses.jsonl`: an item with its authors named."""

    item: str
    stratum: str
    category: str | None
    prompt: list[Message]
    sft: str
    policy: str


def blind(chosen: Sequence[Chosen], sft: Sequence[str], policy: Sequence[str], seed: int) -> tuple[list[Item], str]:
    """Items in a drawn order with drawn sides, and the salt that keeps the key's digest from being guessed.

    Sides are balanced: half and half, to within one, over all items and within every stratum.
    """
    secret = digest_json([seed, [[c.prompt, s, p] for c, s, p in zip(chosen, sft, policy, strict=True)]])
    places = list(range(len(chosen)))
    random.Random(f"{secret} sides").shuffle(places)
    places.sort(key=lambda i: chosen[i].stratum)
    first: int = random.Random(f"{secret} first").getrandbits(1)
    sides: dict[int, Side] = {i: "ab"[(n + first) % 2] for n, i in enumerate(places)}  # type: ignore[misc]
    order = list(range(len(chosen)))
    random.Random(f"{secret} order").shuffle(order)
    items = [Item(f"q{n:04d}", chosen[i], sft[i], policy[i], sides[i]) for n, i in enumerate(order, 1)]
    return items, digest_json([secret, "salt"])


def sealed_key(items: Sequence[Item], salt: str) -> SealedKey:
    """The content of `key.json`: on which side each item's policy response stands."""
    return {
        "note": "Raters must not see this file before they have rated.",
        "policy_side": {item.item: item.policy_side for item in items},
        "salt": salt,
    }


def sheet_item(item: str, commitment: str) -> str:
    """An item's name on the sheet: its number and the start of the key's sha256, so that no sheet is scored by the key
    of another."""
    return f"{item}-{commitment[:8]}"
