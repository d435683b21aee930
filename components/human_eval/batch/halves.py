"""Which judged prompts may train later, and which only judge, forever.

What people say of a policy's samples comes back as training data. A policy that trained on all judged prompts would
leave nothing to judge it on, so half of them never train.
"""

import hashlib
from collections.abc import Sequence

from components.base.jsonl import Message
from components.data.splits import loose_key

PREFERENCES = "preferences.jsonl"
"""In a scored artifact: the rated pairs whose prompts may train, as rows that `data.preferences` reads."""
JUDGED = "judged.jsonl"
"""Those whose prompts only judge, forever, as such rows too: wherever they are read they are held out."""
JUDGED_IN = "judged_in"
"""The field of a row of preferences that says in which batch people judged it: the first digits of its key's sha256."""


def may_train(prompt: Sequence[Message]) -> bool:
    """Whether a judged prompt may train later; the others only judge.

    It is the highest bit of sha256("human_eval half" + `loose_key`), so that a prompt stays in its half in every batch,
    run and home, and its variants in case, punctuation or white space stay with it. Half of all prompts may.
    """
    return hashlib.sha256(f"human_eval half{loose_key(prompt)}".encode("utf-8", "surrogatepass")).digest()[0] >= 128
