"""Chat templates by name, for tokenizers without one, and the tokens that a template needs.

A template is a Jinja program over `messages` (`role`, `content`) and `add_generation_prompt`, as in Hugging Face
tokenizers.
"""

import re
from typing import Any

CHAT_TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] }}<|eot_id|>"
        "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m['role'] | capitalize }}:\n{{ m['content'] }}"
        "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}\n\n{% endfor %}"
        "{% if add_generation_prompt %}Assistant:\n{% endif %}"
    ),
}
"""ChatML (OpenAI 2023), Llama 3's header format, and roles as plain words, which needs no token except EOS."""


def lacking(folder: object, field: str) -> str:
    """Return the text of the error that the tokenizer in `folder`, which `field` names, has no chat template."""
    by_option = " Or set sft.chat_template, as in --set sft.chat_template=chatml." if field == "sft.base" else ""
    return f"{field}: the tokenizer in {folder} has no chat template; add one to it.{by_option}"


_QUESTION = [{"role": "user", "content": "Hello."}]
_CONVERSATIONS = ([{"role": "system", "content": "Be kind."}, *_QUESTION], _QUESTION)
_ANSWER = "Good day."
_MARKER = re.compile(r"<\|[A-Za-z0-9_]{2,40}\|>")


def _renderings(tokenizer: Any, fixed: dict[str, str]) -> list[tuple[str, str]]:
    """Return the rendered prompt and the rendered whole conversation of each probe that the template accepts."""
    found = []
    for messages in _CONVERSATIONS:
        answered = [*messages, {"role": "assistant", "content": _ANSWER}]
        try:
            found.append((
                tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **fixed),
                tokenizer.apply_chat_template(answered, tokenize=False, **fixed),
            ))  # fmt: skip
        except Exception:  # the template may raise anything; the data contract counts refused conversations
            continue
    return found


def add_markers(tokenizer: Any, fixed: dict[str, str]) -> list[str]:
    """Add the markers that the template writes and the tokenizer lacks, such as <|im_start|>, as special tokens.

    Returns those added. A marker that the tokenizer has as an ordinary token becomes special.
    """
    texts = [text for pair in _renderings(tokenizer, fixed) for text in pair]
    markers = list(dict.fromkeys(marker for text in texts for marker in _MARKER.findall(text)))
    known = set(tokenizer.get_vocab())
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if wanted := [marker for marker in markers if marker not in special]:
        tokenizer.add_special_tokens({"extra_special_tokens": wanted}, replace_extra_special_tokens=False)
    return [marker for marker in wanted if marker not in known]


def turn_end(tokenizer: Any, fixed: dict[str, str]) -> str | None:
    """Return the special token that the template writes after a response (it may be EOS); None if there is none."""
    named = [str(token) for token in tokenizer.all_special_tokens]
    named += [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    for prompt, whole in _renderings(tokenizer, fixed):
        rest = whole.removeprefix(prompt).lstrip().removeprefix(_ANSWER).lstrip()
        if tokenizer.eos_token and rest.startswith(tokenizer.eos_token):
            return str(tokenizer.eos_token)
        if whole.startswith(prompt) and (found := [token for token in named if rest.startswith(token)]):
            return max(found, key=len)
    return None
