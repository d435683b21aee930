"""What ends a response: EOS, further tokens that end a turn as EOS does, and strings.

All of it stands in the tokenizer, and so in the `tokenizer_config.json` of every model that is saved with it. Where a
tokenizer has nothing but its EOS, the file has no line more.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

_TOKENS, _STRINGS = "end_tokens", "stop_strings"


class Endings(NamedTuple):
    """The endings of a tokenizer's responses."""

    ids: tuple[int, ...]
    """Token ids, first EOS, which ends every text that is trained on."""
    strings: tuple[str, ...]
    """A sampled response ends where one of them is complete; its text is what stands before it."""


def set_endings(tokenizer: Any, tokens: Sequence[str] = (), strings: Sequence[str] = ()) -> None:
    """Let responses end with `tokens` too, beside EOS, and at `strings`; a string that is a special token is a token.

    A token that is none of the tokenizer's is left out, and so is its pad token, which is never sampled.
    """
    special = {str(token) for token in tokenizer.all_special_tokens}
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    known = tokenizer.get_vocab()
    wanted = [*tokens, *(text for text in strings if text in special)]
    own = (tokenizer.eos_token, tokenizer.pad_token)
    kept = [token for token in dict.fromkeys(wanted) if token in known and token not in own]
    _put(tokenizer, _TOKENS, kept)
    _put(tokenizer, _STRINGS, [text for text in dict.fromkeys(strings) if text not in special])


def _put(tokenizer: Any, name: str, values: list[str]) -> None:
    tokenizer.init_kwargs.pop(name, None)
    if values:
        tokenizer.init_kwargs[name] = values


def endings_of(tokenizer: Any) -> Endings:
    """The endings of the tokenizer's responses."""
    told = tokenizer.init_kwargs
    further = (tokenizer.convert_tokens_to_ids(token) for token in told.get(_TOKENS, ()))
    return Endings((tokenizer.eos_token_id, *further), tuple(told.get(_STRINGS, ())))


def before_stop(tokenizer: Any, text: str) -> str:
    """`text` up to its first stop string; all of it where it holds none."""
    found = [at for each in endings_of(tokenizer).strings if (at := text.find(each)) >= 0]
    return text[: min(found)] if found else text
