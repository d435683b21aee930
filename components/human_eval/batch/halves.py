"""Split judged prompts into those that may be trained on later, and those that are held out for good.

People's judgements of a policy's samples become training data. If all judged prompts were trained on, none would be
left to judge later policies on, so half of them are never trained on.
"""

import hashlib
from collections.abc import Sequence

from components.base.jsonl import Message
from components.data.splits import loose_key

PREFERENCES = "preferences.jsonl"
"""A file of a scored artifact: the rated pairs whose prompts may be trained on, as rows of `data.preferences`."""
HELD_OUT = "judged.jsonl"
"""The same for pairs whose prompts are held out for good: whoever reads this file holds them out."""
JUDGED_IN = "judged_in"
"""The field of a preference row that names the batch in which people judged it, by the first digits of its key."""


def may_train(prompt: Sequence[Message]) -> bool:
    """Return whether a judged prompt may be trained on later; half of all prompts may.

    It is the highest bit of sha256("human_eval half" + `loose_key`). So a prompt, with its variants in case,
    punctuation or white space, is in the same half in every batch, run and home.
    """
    return hashlib.sha256(f"human_eval half{loose_key(prompt)}".encode("utf-8", "surrogatepass")).digest()[0] >= 128
