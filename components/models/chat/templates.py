"""Chat templates: those with a name, what is fixed in one, what it writes around an answer, and the tokens it needs.

A template is a Jinja program over `messages` (`role`, `content`) and `add_generation_prompt`, as in Hugging Face
tokenizers. What differs from the base's own template is written into its text, so that the exported model renders the
same conversation as training, whoever loads it.
"""

import re
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.models.config import ChatTemplateConfig

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


FIXED = {"date_string": "26 Jul 2024"}
"""The date that chat templates write instead of today's; it is the one to which Llama 3's fall back."""
_ALWAYS_GIVEN = {"messages", "tools", "documents", "add_generation_prompt", *FIXED}
_DAY = datetime.strptime(FIXED["date_string"], "%d %b %Y")
_SYSTEM_IN_QUESTION = (
    "{%- if messages | length > 1 and messages[0]['role'] == 'system' and messages[1]['role'] == 'user' %}"
    "{%- set messages = [{'role': 'user', 'content': messages[0]['content'] + '\\n\\n' + messages[1]['content']}]"
    " + messages[2:] %}{%- endif %}\n"
)


def fixed_template(template: str, options: ChatTemplateConfig) -> str:
    """Return `template` with one fixed date, without chance, and with the variables and system message of `options`.

    Only what the template uses is fixed: the filter `random` becomes `first`. Text that is put before a template ends
    with a line break, which Jinja removes (trim_blocks), so that the template still begins at the start of a line.

    Raises:
        TemplateSyntaxError, ValueError: it is no template.
        UserError: `options` give a variable that the template does not read.
    """
    from jinja2 import Environment

    tokens = [(kind, text) for _, kind, text in Environment().lex(template)]
    names = {text for kind, text in tokens if kind == "name"}
    if unread := sorted(options.template_variables.keys() - (names - _ALWAYS_GIVEN)):
        raise UserError(
            f"sft.template_variables.{unread[0]}: the chat template reads no variable of this name. Correct the name, "
            "or leave it out."
        )
    code = [place for place, (kind, _) in enumerate(tokens) if kind != "whitespace"]
    chance = [b for a, b in pairwise(code) if (tokens[a][1], tokens[b][1]) == ("|", "random")]
    if chance:
        template = "".join("first" if place in chance else text for place, (_, text) in enumerate(tokens))
    defaults = {name: FIXED[name] for name in FIXED if name in names} | dict(options.template_variables)
    before = [f"{{%- set {name} = {name} | default({value!r}) %}}\n" for name, value in defaults.items()]
    if "strftime_now" in names:
        formats = sorted({text[1:-1] for kind, text in tokens if kind == "string" and "%" in text})
        dates = {each: _DAY.strftime(each) for each in formats}
        before.append(f"{{%- macro strftime_now(format) %}}{{{{ {dates}.get(format, {FIXED['date_string']!r}) }}}}")
        before[-1] += "{% endmacro %}\n"
    if "lipsum" in names:
        before.append("{%- macro lipsum(n, html, min, max) %}{% endmacro %}\n")
    if options.system_in_question:
        before.append(_SYSTEM_IN_QUESTION)
    return "".join(text for text in before if text not in template) + template


def lacking(folder: object, field: str) -> str:
    """Return the text of the error that the tokenizer in `folder`, which `field` names, has no chat template."""
    by_option = " Or set sft.chat_template, as in --set sft.chat_template=chatml." if field == "sft.base" else ""
    return f"{field}: the tokenizer in {folder} has no chat template; add one to it.{by_option}"


QUESTION = [{"role": "user", "content": "Hello."}]
_EARLIER = "It is me."
_CONVERSATIONS = (
    QUESTION,
    [{"role": "system", "content": "Be kind."}, *QUESTION],
    [{"role": "user", "content": "Who is there? " * 300}, {"role": "assistant", "content": _EARLIER}, *QUESTION],
)
_ANSWERS = ("Good day.", "No")
_MARKER = re.compile(r"<\|[A-Za-z0-9_]{2,40}\|>")


class _Rendered(NamedTuple):
    """A question and its answer as the template writes them."""

    prompt: str
    """The question with a generation prompt."""
    asked: str
    """The question without one."""
    before: str
    """Of the whole conversation, what stands before the answer."""
    after: str


def renderings(tokenizer: Any) -> list[_Rendered]:
    """Return each probe that the template accepts and in which its answer stands unchanged."""
    found = []
    for messages in _CONVERSATIONS:
        for answer in _ANSWERS:
            whole = [*messages, {"role": "assistant", "content": answer}]
            try:
                prompt, asked, answered = (
                    str(tokenizer.apply_chat_template(each, tokenize=False, add_generation_prompt=asking, **FIXED))
                    for each, asking in ((messages, True), (messages, False), (whole, False))
                )
            except MemoryError:
                raise
            except Exception:  # it may raise anything; the data contract counts refused conversations
                continue
            before, answer_there, after = answered.rpartition(answer)
            if answer_there:
                found.append(_Rendered(prompt, asked, before, after))
    return found


def add_markers(tokenizer: Any) -> list[str]:
    """Add the markers that the template writes and the tokenizer lacks, such as <|im_start|>, as special tokens.

    Returns those added. A marker that the tokenizer has as an ordinary token becomes special.
    """
    texts = [text for rendered in renderings(tokenizer) for text in rendered]
    markers = list(dict.fromkeys(marker for text in texts for marker in _MARKER.findall(text)))
    known = set(tokenizer.get_vocab())
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if wanted := [marker for marker in markers if marker not in special]:
        tokenizer.add_special_tokens({"extra_special_tokens": wanted}, replace_extra_special_tokens=False)
    return [marker for marker in wanted if marker not in known]


def turn_end(tokenizer: Any) -> str | None:
    """Return the special token that closes an answer (it may be EOS); None if the template writes none after it.

    A token that begins a turn closes nothing, even if the template writes it after an answer: one with which the
    conversation begins, or one that stands before an answer and is not the first after an earlier one.

    Raises:
        ValueError: the template writes such a token after an answer.
    """
    special = {str(token) for token in tokenizer.all_special_tokens}
    special |= {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    rendered = renderings(tokenizer)
    if not special or not rendered:
        return None
    either = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    whole, (_, _, before, after) = [each.before for each in rendered], rendered[0]
    eos = str(tokenizer.eos_token)
    first = re.match(rf"\s*({either})", after)
    end = eos if after.lstrip().startswith(eos) else first and first[1]
    if end is None:
        return None
    head, _, between = before.partition(QUESTION[0]["content"])
    begins = re.match(rf"(\s|{either})*", head.removeprefix(str(tokenizer.bos_token)))
    earlier = next((text.partition(_EARLIER)[2] for text in whole if _EARLIER in text), "")
    closes = re.search(either, earlier)
    if (begins and end in begins[0]) or (end in between and closes and closes[0] != end):
        raise ValueError(f"after a response it writes {end}, which begins a turn")
    return end


def completed_template(tokenizer: Any) -> str:
    """Return the tokenizer's chat template, so completed that a prompt ends where the answer begins.

    What the template writes between prompt and answer, such as an empty thought, is put at the end of prompts. If its
    generation prompt is not what stands before an answer, as in DeepSeek-V3's <think>, it is replaced. (Spaces alone
    belong to the answer's first token.) EOS is put behind the last answer if the template writes nothing there.

    Raises:
        ValueError: what stands before an answer depends on the conversation.
    """
    template, rendered = str(tokenizer.get_chat_template()), renderings(tokenizer)
    own = {_rest(each.before, each.prompt) for each in rendered}
    derived = {_rest(each.before, each.asked) for each in rendered}
    gaps, asks = (derived, "generation_prompt_asked") if None in own else (own, "add_generation_prompt")
    if None in gaps:
        raise ValueError("it writes a prompt otherwise where an answer follows")
    if len(gaps) > 1:
        texts = ", ".join(sorted(repr(gap) for gap in gaps))
        raise ValueError(f"what it writes between prompt and answer depends on the conversation: {texts}")
    before = after = ""
    for gap in gaps:
        if gap and (gap.strip(" ") or gaps is derived):
            after += f"{{%+ if {asks} %}}{{{{ {gap!r} }}}}{{% endif %}}"
        if gaps is derived:
            before = (
                f"{{%- set {asks} = add_generation_prompt | default(false) %}}\n"
                "{%- set add_generation_prompt = false %}\n"
            )
    if tokenizer.eos_token and rendered and not any(each.after.strip() for each in rendered):
        after += (
            "{%+ if messages[-1]['role'] == 'assistant' and not " + asks + " %}"
            f"{{{{ {str(tokenizer.eos_token)!r} }}}}{{% endif %}}"
        )
    return before + (template.removesuffix("\n") if after else template) + after


def _rest(text: str, beginning: str) -> str | None:
    return text[len(beginning) :] if text.startswith(beginning) else None
