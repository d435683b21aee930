"""Split a text into words (into characters, for scripts without spaces between words), and normalise a label's
value."""

import re
from typing import Any

# Thai, Lao, Tibetan, Burmese, Khmer, kana, Han (with its extensions) and half-width kana. Korean has spaces.
_UNSPACED = re.compile(
    r"[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\uff66-\uff9d\U00020000-\U000323af]"
)


def words_of(text: str) -> list[str]:
    """Return the words of `text` between white space; each character of a script without spaces is a word."""
    return text.split() if text.isascii() else _UNSPACED.sub(r" \g<0> ", text).split()


def label_key(value: Any) -> str:
    """Return a label's value as a key of `data.label_values`: `1` for 1 and 1.0, `true` for True, text case-folded."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip().lower()
