"""Split a text into words (into characters, for emoji and scripts without spaces), and normalise a label's value."""

import re
import unicodedata
from typing import Any

# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han (with its extensions) and half-width kana. Korean has spaces.
# Symbols and emoji, each with the marks that follow it (variation, skin tone, joiner).
_UNSPACED = re.compile(
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9d\U00020000-\U000323af]"
    r"|[\u2600-\u27bf\U0001f000-\U0001faff][\ufe0e\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff]*"
)


_FORMAT = re.compile("[\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]")
"""Characters that nobody sees: soft hyphens, zero-width characters, and marks of a text's direction."""


_UNSEEN = re.compile(_FORMAT.pattern[:-1] + "\u034f\u206a-\u206f\ufe00-\ufe0f]")
"""These, joiners of marks, and the variants of a character."""
_SPACE = re.compile(r"[^\S\n\t]")
_WHOLE = re.compile(r"[+-]?\d+\.0+", re.ASCII)


def folded(text: str) -> str:
    """Return `text` case-folded, without invisible characters, in Unicode's form NFKC.

    So texts that look the same are equal, whether an accent is a character of its own or not.
    """
    if text.isascii():
        return text.casefold()
    return unicodedata.normalize("NFKC", _FORMAT.sub("", text).casefold())


def seen(text: str) -> str:
    """Return `text` as a reader sees it: in Unicode's form NFC, without invisible characters, all spaces alike."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text if text.isascii() else _SPACE.sub(" ", unicodedata.normalize("NFC", _UNSEEN.sub("", text)))


def words_of(text: str) -> list[str]:
    """Return the words of `text` between white space; each character of a script without spaces, and each emoji, is a
    word."""
    return text.split() if text.isascii() else _UNSPACED.sub(r" \g<0> ", text).split()


def label_key(value: Any) -> str:
    """Return a label's value as a key of `data.label_values`: `1` for 1, 1.0 and the text `1.0`, which pandas writes
    where a value is missing; `true` for True; text case-folded."""
    text = str(value).strip().lower()
    return text.partition(".")[0] if _WHOLE.fullmatch(text) else text
