"""Splits by prompt: a prompt's split depends only on its own text, never on other rows, their order or the seed."""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from components.base.hashing import canonical_json
from components.data.config import SplitConfig
from components.data.rows import Message
from components.data.words import folded, seen

SPLITS = ("train", "calibration", "test")


def prompt_key(prompt: Sequence[Message]) -> str:
    """Return canonical JSON of a prompt's messages; two prompts with equal keys are the same prompt to a reader."""
    return canonical_json([{**message, "content": seen(message["content"])} for message in prompt])


def split_of(key: str, shares: SplitConfig) -> str:
    """Return the split of a prompt by its key: u = (first 8 bytes of sha256("split" + key)) / 2^64, cut at the
    shares."""
    digest = hashlib.sha256(("split" + key).encode("utf-8", "surrogatepass")).digest()
    u = int.from_bytes(digest[:8], "big") / 2**64
    if u < shares.train:
        return "train"
    return "calibration" if u < shares.train + shares.calibration else "test"


_ASCII_WORD = re.compile(r"\w+")


@cache
def _word() -> re.Pattern[str]:
    """Return the pattern of a word: letters, digits and the marks combined with them, which Python's `\\w` lacks."""
    marks = "".join(chr(code) for code in range(0x300, 0x20000) if unicodedata.category(chr(code)).startswith("M"))
    return re.compile(rf"\w[\w{marks}]*")


def loose_key(prompt: Sequence[Message]) -> str:
    """Return only a prompt's words and digits, case-folded: equal for variants in case, punctuation and white space.

    Combining marks are part of a word, as in Hindi or Thai. A prompt without any word or digit, such as `?` or an
    emoji, keeps its symbols.
    """
    texts = [folded(m["content"]) for m in prompt]
    words = "\n".join(" ".join((_ASCII_WORD if text.isascii() else _word()).findall(text)) for text in texts)
    return words if words.strip() else "\n".join(" ".join(text.split()) for text in texts)
