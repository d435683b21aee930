"""What ends a response: EOS, other tokens that end a turn, and stop strings.

These are stored in the tokenizer, and so in the `tokenizer_config.json` of every model that is saved with it. For a
tokenizer with only EOS, nothing is added to the file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

_TOKENS, _STRINGS = "end_tokens", "stop_strings"


class Endings(NamedTuple):
    """The endings of a tokenizer's responses."""

    ids: tuple[int, ...]
    """Token ids that end a response. The first is EOS, which ends every training text."""
    strings: tuple[str, ...]
    """Stop strings: a sampled response ends when one is complete, and its text ends before that string."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Return every token that the tokenizer marks as special, by id; often more than have a role (SmolLM2: 17, and
    3)."""
    marked = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return marked | {i: str(token) for i, token in named}


def set_endings(tokenizer: Any, tokens: Sequence[str] = (), strings: Sequence[str] = ()) -> None:
    """Let responses also end with `tokens` and at `strings`. A string that is a special token is treated as a token.

    Tokens that the tokenizer lacks are ignored, and so is its pad token, which is never sampled.
    """
    special = set(special_tokens(tokenizer).values())
    vocabulary = tokenizer.get_vocab()
    wanted = [*tokens, *(text for text in strings if text in special)]
    roles = (tokenizer.eos_token, tokenizer.pad_token)
    accepted = [token for token in dict.fromkeys(wanted) if token in vocabulary and token not in roles]
    _put(tokenizer, _TOKENS, accepted)
    _put(tokenizer, _STRINGS, [text for text in dict.fromkeys(strings) if text not in special])


def _put(tokenizer: Any, name: str, values: list[str]) -> None:
    tokenizer.init_kwargs.pop(name, None)
    if values:
        tokenizer.init_kwargs[name] = values


def endings_of(tokenizer: Any) -> Endings:
    """Return the endings of the tokenizer's responses."""
    settings = tokenizer.init_kwargs
    further = (tokenizer.convert_tokens_to_ids(token) for token in settings.get(_TOKENS, ()))
    return Endings((tokenizer.eos_token_id, *further), tuple(settings.get(_STRINGS, ())))


def before_stop(tokenizer: Any, text: str) -> str:
    """Return `text` up to its first stop string; the whole text if it has none."""
    return before_any(endings_of(tokenizer).strings, text)


def before_any(strings: Sequence[str], text: str) -> str:
    """Return `text` up to the first of `strings` in it; the whole text if it has none."""
    places = [at for string in strings if (at := text.find(string)) >= 0]
    return text[: min(places)] if places else text
