"""Render conversations in a tokenizer's chat template: one at a time, or many in less time.

transformers copies each message several times before its template renders it, since a caller may pass images, functions
and missing fields. That takes longer than rendering. `ManyRendered` passes messages of plain text to the compiled
template unchanged. The template can't modify them: transformers' Jinja environment is immutable.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from components.models.chat.templates import FIXED

logger = logging.getLogger(__name__)

def rendered_prompt(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Return a prompt in the tokenizer's chat template, ending where the response begins."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **FIXED)


def rendered_conversation(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> str:
    """Return a whole conversation, including its last response, in the tokenizer's chat template."""
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **FIXED)


class ManyRendered:
    """Renders many conversations in one tokenizer's chat template.

    The first ones are also rendered by transformers' `apply_chat_template`. If the texts differ, because another
    version of transformers prepares messages differently, only `apply_chat_template` is used.

    All messages must have exactly the fields `role` and `content`, both of type `str`, as those of a `CanonicalRow`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._template = _compiled(tokenizer)
        self._variables = {**tokenizer.special_tokens_map, **FIXED}
        self._compared: set[bool] = set()

    def prompts(self, prompts: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        """Return `rendered_prompt` of each prompt. Raises what the template raises of one of them."""
        return self._all(prompts, True)

    def conversations(self, conversations: Sequence[Sequence[Mapping[str, str]]]) -> list[str]:
        """Return `rendered_conversation` of each conversation. Raises what the template raises of one of them."""
        return self._all(conversations, False)

    def _all(self, conversations: Sequence[Sequence[Mapping[str, str]]], asking: bool) -> list[str]:
        if self._template is None:
            return self._by_transformers(conversations, asking)
        variables = self._variables | {"tools": None, "documents": None, "add_generation_prompt": asking}
        texts = [self._template.render(variables, messages=messages) for messages in conversations]
        if asking not in self._compared:
            self._compared.add(asking)
            expected = self._by_transformers(conversations, asking)
            if texts != expected:
                logger.warning("transformers renders this chat template differently: only its own function is used")
                self._template = None
            return expected
        return texts

    def _by_transformers(self, conversations: Sequence[Sequence[Mapping[str, str]]], asking: bool) -> list[str]:
        return self._tokenizer.apply_chat_template(
            list(conversations), tokenize=False, add_generation_prompt=asking, **FIXED
        )


def _compiled(tokenizer: Any) -> Any:
    """Return the tokenizer's chat template as transformers compiles it; None if this version has no such function."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        logger.warning("this version of transformers compiles chat templates elsewhere: rendering takes twice the time")
        return None
    return _compile_jinja_template(tokenizer.get_chat_template())
