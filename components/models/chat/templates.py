"""Chat templates: those with a name, what is fixed in one, what it writes around an answer, and the tokens it needs.

A template is a Jinja program over `messages` (`role`, `content`) and `add_generation_prompt`, as in Hugging Face
tokenizers. What differs from the base's own template is written into its text, so that the exported model renders the
same conversation as training, whoever loads it.
"""

import re
from datetime import datetime
from itertools import pairwise, product
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.models.chat.endings import special_tokens
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
        date = f"{ {text: _DAY.strftime(text) for text in formats} }.get(format, {FIXED['date_string']!r})"
        before.append(f"{{%- macro strftime_now(format) %}}{{{{ {date} }}}}{{% endmacro %}}\n")
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
_MARKER = re.compile(r"<[|\uff5c][^<>|\uff5c\s]{2,40}[|\uff5c]>|<(?:start|end)_of_turn>")


class _Rendered(NamedTuple):
    """A question and its answer in the template: `prompt` has a generation prompt, `question` none; in the whole
    conversation, `before` and `after` stand around the answer."""

    prompt: str
    question: str
    before: str
    after: str


def renderings(tokenizer: Any) -> list[_Rendered]:
    """Return each probe that the template accepts and in which its answer stands unchanged."""
    probes = []
    for messages, answer in product(_CONVERSATIONS, _ANSWERS):
        whole = [*messages, {"role": "assistant", "content": answer}]
        try:
            prompt, question, answered = (
                str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=asking, **FIXED))
                for talk, asking in ((messages, True), (messages, False), (whole, False))
            )
        except MemoryError:
            raise
        except Exception:  # it may raise anything; the data contract counts refused conversations
            continue
        before, separator, after = answered.rpartition(answer)
        if separator:
            probes.append(_Rendered(prompt, question, before, after))
    return probes


def add_markers(tokenizer: Any) -> list[str]:
    """Add the markers that the template writes and the tokenizer lacks, such as <|im_start|>, as special tokens.

    Returns those added. A marker that the tokenizer has as an ordinary token becomes special.
    """
    texts = [text for probe in renderings(tokenizer) for text in probe]
    markers = list(dict.fromkeys(marker for text in texts for marker in _MARKER.findall(text)))
    vocabulary = set(tokenizer.get_vocab())
    special = special_tokens(tokenizer).values()
    if wanted := [marker for marker in markers if marker not in special]:
        tokenizer.add_special_tokens({"extra_special_tokens": wanted}, replace_extra_special_tokens=False)
    return [marker for marker in wanted if marker not in vocabulary]


def turn_end(tokenizer: Any) -> str | None:
    """Return the special token that closes an answer (it may be EOS); None if the template writes none after it.

    A token that begins a turn closes nothing, even if the template writes it after an answer: one of the first special
    tokens of the conversation, or one that stands before an answer and is not the first after an earlier one.

    Raises:
        ValueError: the template writes such a token after an answer.
    """
    probes, special = renderings(tokenizer), sorted(special_tokens(tokenizer).values(), key=len, reverse=True)
    either = "|".join(map(re.escape, special))
    end = re.match(rf"\s*({either})", probes[0].after) if probes and special else None
    if end is None:
        return None
    head, _, between = probes[0].before.partition(QUESTION[0]["content"])
    begin = re.search(rf"({either})(\s|{either})*", head.removeprefix(str(tokenizer.bos_token)))
    earlier = re.search(either, probes[-1].before.partition(_EARLIER)[2])
    begins = (begin and end[1] in begin[0]) or (end[1] in between and earlier and earlier[0] != end[1])
    if begins and end[1] != tokenizer.eos_token:
        raise ValueError(f"after a response it writes {end[1]}, which begins a turn")
    return end[1]


def completed_template(tokenizer: Any) -> str:
    """Return the tokenizer's chat template, so completed that a prompt ends where the answer begins.

    What the template writes between prompt and answer, such as an empty thought, is put at the end of prompts. If its
    generation prompt is not what stands before an answer, as in DeepSeek-V3's <think>, it is replaced. (Spaces alone
    belong to the answer's first token.) EOS is put behind the last answer if the template writes nothing there
    but separates question and answer.

    Raises:
        ValueError: what stands before an answer depends on the conversation.
    """
    probes, asks, before, after = renderings(tokenizer), "add_generation_prompt", "", ""
    gaps = {_rest(probe.before, probe.prompt) for probe in probes}
    if None in gaps:
        gaps, asks = {_rest(probe.before, probe.question) for probe in probes}, "generation_prompt_asked"
        before = f"{{%- set {asks} = add_generation_prompt %}}\n{{%- set add_generation_prompt = false %}}\n"
    if None in gaps or len(gaps) > 1:
        texts = ", ".join(sorted(map(repr, gaps - {None}))) or "a prompt changes where an answer follows"
        raise ValueError(f"what it writes between prompt and answer depends on the conversation ({texts})")
    if any(gap and gap.strip(" ") for gap in gaps):
        after = f"{{%+ if {asks} %}}{{{{ {gaps.pop()!r} }}}}{{% endif %}}"
    separates = probes and not probes[0].before.endswith(QUESTION[0]["content"])
    if tokenizer.eos_token and separates and not any(probe.after.strip() for probe in probes):
        last = f"{{%+ if messages[-1]['role'] == 'assistant' and not {asks} %}}"
        after += f"{last}{{{{ {str(tokenizer.eos_token)!r} }}}}{{% endif %}}"
    template = str(tokenizer.get_chat_template())
    return before + (template.removesuffix("\n") if after else template) + after


def _rest(text: str, beginning: str) -> str | None:
    return text[len(beginning) :] if text.startswith(beginning) else None
