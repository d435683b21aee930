"""Draw the side of the policy's response and the order of the items, and seal the key to both.

All random choices come from a keyed digest of the responses *with their authors*. The key is a secret of the home.
Without it, a rater with the prompts, the profile's seed and this code could search for the sides that give the digest
on the sheet.
"""

import hashlib
import hmac
import os
import random
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, NotRequired, TypedDict

from components.base.errors import naming
from components.base.files import make_folder, temporary_beside
from components.base.hashing import canonical_json, digest_json
from components.base.jsonl import Message
from components.human_eval.selection import Chosen

Side = Literal["a", "b"]

SECRET = "human_eval.seal"
"""The file with the home's secret."""


def home_secret(home: Path) -> Path:
    """Return the file with the home's secret, 256 random bits as text. It is made on the first call, with mode 600.

    It is an input of the stage that samples, so that its digest, which does not reveal it, is in that stage's key: the
    same home gives the same sheet. No export, backup of artifacts or report contains it.
    """
    path = home / SECRET
    if not path.exists():
        make_folder(home)
        temporary = temporary_beside(path)
        with naming(path):
            try:
                with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                    file.write(secrets.token_hex(32))
                    file.flush()
                    os.fsync(file.fileno())
                with suppress(FileExistsError):  # another process was first; its secret is used
                    os.link(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
    return path


class Item(NamedTuple):
    """A pair to judge, with its authors known."""

    item: str
    """Its number on the sheet, `q0001`."""
    chosen: Chosen
    sft: str
    policy: str
    policy_side: Side
    repeat_of: str | None = None
    """The item whose pair this one repeats, with sides exchanged."""
    distortion: str | None = None
    """For an attention check, how its wrong reply was made; its `policy` is the right reply."""


class SealedKey(TypedDict):
    """The content of `key.json`."""

    note: str
    policy_side: dict[str, Side]
    """Maps an item to the policy's side."""
    repeat_of: NotRequired[dict[str, str]]
    """Maps an item to the one that it repeats."""
    attention: NotRequired[dict[str, Side]]
    """Maps an attention check to its right answer. These items are in neither of the other maps."""
    attention_made: NotRequired[dict[str, str]]
    """Maps an attention check to how its wrong reply was made."""
    salt: str


class AuthoredItem(TypedDict):
    """A line of `responses.jsonl`: an item with its authors."""

    item: str
    stratum: str
    category: str | None
    prompt: list[Message]
    sft: str
    policy: str


def blind(
    chosen: Sequence[Chosen], sft: Sequence[str], policy: Sequence[str], seed: int, key: bytes = b"",
    repeats: int = 0,
) -> tuple[list[Item], str]:
    """Return items in random order with random sides, and the salt without which the key could be guessed by its
    digest.

    Sides are balanced to within one over all items and within every stratum. `repeats` of the pairs are shown again
    later with their sides exchanged.

    Args:
        key: the home's secret; empty if nobody has to be kept blind.
    """
    content = [seed, [[c.prompt, s, p] for c, s, p in zip(chosen, sft, policy, strict=True)]]
    text = canonical_json(content)
    secret = hmac.new(key, text.encode(), hashlib.sha256).hexdigest() if key else digest_json(content)
    places = list(range(len(chosen)))
    random.Random(f"{secret} sides").shuffle(places)
    places.sort(key=lambda i: chosen[i].stratum)
    first: int = random.Random(f"{secret} first").getrandbits(1)
    sides: dict[int, Side] = {i: "ab"[(n + first) % 2] for n, i in enumerate(places)}  # type: ignore[misc]
    again = random.Random(f"{secret} repeats").sample(range(len(chosen)), min(repeats, len(chosen)))
    order = [*range(len(chosen)), *again]
    random.Random(f"{secret} order").shuffle(order)
    items: list[Item] = []
    first_items: dict[int, str] = {}
    for n, i in enumerate(order, 1):
        side: Side = sides[i] if i not in first_items else "b" if sides[i] == "a" else "a"
        items.append(Item(f"q{n:04d}", chosen[i], sft[i], policy[i], side, first_items.get(i)))
        first_items.setdefault(i, items[-1].item)
    return items, digest_json([secret, "salt"])


def sealed_key(items: Sequence[Item], salt: str) -> SealedKey:
    """Return the content of `key.json`: the side of each item's policy response."""
    return {
        "note": "Raters must not see this file before they have rated.",
        "policy_side": {item.item: item.policy_side for item in items if item.distortion is None},
        "attention": {item.item: item.policy_side for item in items if item.distortion is not None},
        "attention_made": {item.item: item.distortion for item in items if item.distortion is not None},
        "repeat_of": {item.item: item.repeat_of for item in items if item.repeat_of is not None},
        "salt": salt,
    }


def sheet_item(item: str, commitment: str) -> str:
    """Return an item's name on the sheet: its number and the start of the key's sha256, so that a sheet cannot be
    scored with another sheet's key."""
    return f"{item}-{commitment[:8]}"
