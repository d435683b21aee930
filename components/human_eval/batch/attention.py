"""Attention checks: items whose right answer is known, to see whether raters read what they rate.

One reply is what a person wrote to a held-out prompt. The other is a reply to a different prompt, or the same words in
random order. On the sheet such an item looks like any other: its number, sides and place are random. Only the sealed
key tells which items these are.
"""

import hashlib
import heapq
import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.hashing import canonical_json, hash8
from components.base.jsonl import Message
from components.data.tables.published import has_split, read_split, rows_at
from components.human_eval.blinding import Item
from components.human_eval.selection import Chosen

_WORDS = 6
"""Fewest words of a reply. A shorter one may fit any prompt, or read well in any order."""
_OTHERS = 200
"""Number of replies among which the least similar one is searched."""


class HeldOutReply(NamedTuple):
    """A reply to a held-out prompt that a person wrote or preferred."""

    prompt: list[Message]
    reply: str


def held_out_replies(data: Path) -> Iterator[HeldOutReply]:
    """Return the preferred replies of the test split that are long enough, one per prompt; rows are read one at a time.

    Raises:
        UserError: there is none.
    """
    pairs = data / "pairs.test"
    rows = read_split(pairs) if has_split(pairs) else []
    last = {hash8(canonical_json(row["prompt"])): (n, _is_long(row["chosen"])) for n, row in enumerate(rows)}
    places = [place for place, is_long in last.values() if is_long]
    if not places:
        raise UserError(
            f"human_eval.attention: no held-out pair has a preferred reply of {_WORDS} or more different "
            "words, so no item can be made whose right answer is known. Set human_eval.attention=0."
        )
    return (HeldOutReply(row["prompt"], row["chosen"]) for row in rows_at(rows, places))


def with_attention(items: Sequence[Item], replies: Iterable[HeldOutReply], count: int, secret: str) -> list[Item]:
    """Insert `count` items with a known right answer into `items` (fewer if there are fewer replies); renumber all.

    The `policy` of such an item is the right reply, and `distortion` says how the wrong one was made: half of them are
    another prompt's reply, the others the same words in random order.

    Args:
        secret: determines all random choices; raters must not know it.
    """
    sampled = {canonical_json(item.chosen.prompt) for item in items}
    first_ones = max(count, _OTHERS)
    ranked = heapq.nsmallest(
        first_ones, replies, key=lambda source: (canonical_json(source.prompt) in sampled, _rank(secret, source.prompt))
    )
    rng = random.Random(f"{secret} attention")
    added: list[Item] = []
    first = rng.getrandbits(1)
    for n, source in enumerate(ranked[:count]):
        wrong = _of_another(source, [other.reply for other in ranked[:_OTHERS]], {one.sft for one in added})
        distortion = "another prompt's reply"
        if n % 2 or wrong is None:
            wrong, distortion = _disordered(source.reply, rng), "words in disorder"
        chosen = Chosen(source.prompt, None, "attention")
        added.append(Item("", chosen, wrong, source.reply, "ab"[(n // 2 + first) % 2], distortion=distortion))  # type: ignore[arg-type]
    places = set(rng.sample(range(len(items) + len(added)), len(added)))
    rng.shuffle(added)
    rest, more = iter(items), iter(added)
    mixed = [next(more if place in places else rest) for place in range(len(items) + len(added))]
    numbers = {item.item: f"q{n:04d}" for n, item in enumerate(mixed, 1) if item.distortion is None}
    return [
        item._replace(item=f"q{n:04d}", repeat_of=None if item.repeat_of is None else numbers[item.repeat_of])
        for n, item in enumerate(mixed, 1)
    ]


def _is_long(reply: str) -> bool:
    return len(set(reply.split())) >= _WORDS


def _rank(secret: str, prompt: list[Message]) -> bytes:
    return hashlib.sha256(f"{secret} attention {canonical_json(prompt)}".encode()).digest()


def _of_another(right: HeldOutReply, replies: Iterable[str], used: set[str]) -> str | None:
    """Return the reply with the fewest words in common with a prompt and its reply; None if there is no other."""
    words = {word.casefold() for text in (right.reply, *(m["content"] for m in right.prompt)) for word in text.split()}
    others = [reply for reply in replies if reply != right.reply and reply not in used]
    return min(others, key=lambda text: _shared(words, text), default=None)


def _shared(words: set[str], text: str) -> float:
    other_words = {word.casefold() for word in text.split()}
    return len(words & other_words) / len(other_words)


def _disordered(text: str, rng: random.Random) -> str:
    """Return the words of `text` in a different order, in which as few neighbours as possible stay together."""
    words = text.split()
    neighbours = set(itertools.pairwise(words))
    orders = [rng.sample(words, len(words)) for _ in range(20)]
    return " ".join(min(orders, key=lambda order: sum(pair in neighbours for pair in itertools.pairwise(order))))
