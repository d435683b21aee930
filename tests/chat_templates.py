"""Chat templates in the form of each family, and what Tether reads of those in a folder, such as those of TRL's wheel.

`python -m tests.chat_templates FOLDER` prints the table of docs/guide/models.md.
"""
# ruff: noqa: RUF001

import argparse
import itertools
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from components.base.errors import UserError
from components.models.chat.rendering import rendered_prompt
from components.models.config import ChatTemplateConfig
from components.models.tokenizers import load_tokenizer
from data_contracts.findings.texts import rendered_and_judged

TURN = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"
ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = TURNS + ASK
LAST = "{% if m.role == 'assistant' and loop.last %}"
LLAMA3 = (
    "{{ bos_token }}{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}"
    "<|start_header_id|>system<|end_header_id|>\n\nToday Date: {{ date_string }}\n\n<|eot_id|>"
    "{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if m['role'] == 'assistant' %}{% set role = 'model' %}"
    "{% else %}{% set role = m['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% else %}{{ m['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
QWEN3 = (
    "{% for m in messages %}" + LAST + "<|im_start|>assistant\n<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{% if m.role == 'assistant' %}<think></think>\n{% endif %}"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{# <|system|> <|user|> #}"
)
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
NEMOTRON = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n<think></think>"
    "{{ m.content }}<|im_end|>\n"
    "{% else %}" + TURN + "{% endif %}{% endfor %}" + ASK.replace("{% endif", "<think>\n{% endif")
)
COHERE = (
    "{{ bos_token }}{% for m in messages %}<|START_OF_TURN_TOKEN|>{% if m.role == 'user' %}<|USER_TOKEN|>"
    "{% elif m.role == 'system' %}<|SYSTEM_TOKEN|>{% else %}<|CHATBOT_TOKEN|>{% endif %}{{ m.content }}"
    "<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}"
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{% if loop.last %}<|return|>{% else %}<|end|>{% endif %}{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
THOUGHT = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
FORMS: dict[str, tuple[str, str, str]] = {
    "Llama": (LLAMA3, "<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "Qwen2": (CHATML, "<|im_end|>", "<|im_start|>assistant\n"),
    "Qwen3": (QWEN3, "<|im_end|>", THOUGHT),
    "GPT-2": ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "</s>", "?\n"),
    "Gemma": (GEMMA, "<end_of_turn>", "<start_of_turn>model\n"),
    "Gemma 2": (GEMMA, "<end_of_turn>", "<start_of_turn>model\n"),
    "Gemma 3": (GEMMA, "<end_of_turn>", "<start_of_turn>model\n"),
    "Mistral": (MISTRAL, "</s>", "[INST] Where? [/INST]"),
    "Mistral 0.1": (MISTRAL.replace("m['content'] + eos", "' ' + m['content'] + eos"), "</s>", "Where? [/INST]"),
    "MiniCPM 3": (CHATML, "<|im_end|>", "<|im_start|>assistant\n"),
    "Phi": (CHATML, "<|im_end|>", "<|im_start|>assistant\n"),
    "Phi 3": (PHI3, "<|end|>", "<|end|>\n<|assistant|>\n"),
    "SmolLM3": (QWEN3, "<|im_end|>", THOUGHT),
    "GLM-4.5": (GLM, "</s>", "<|assistant|>\n<think></think>\n"),
    "DeepSeek-V3": (DEEPSEEK, "<｜end▁of▁sentence｜>", "Where?<｜Assistant｜>"),
    "Nemotron 3": (NEMOTRON, "<|im_end|>", "<|im_start|>assistant\n<think></think>"),
    "Cohere": (COHERE, "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
    "gpt-oss": (GPT_OSS, "<|return|>", "<|start|>assistant<|channel|>final<|message|>"),
    "without a generation prompt": (TURNS, "<|im_end|>", "<|im_end|>\n<|im_start|>assistant\n"),
    "always with a generation prompt": (TURNS + "<|im_start|>assistant\n", "<|im_end|>", "<|im_start|>assistant\n"),
    "SmolLM2": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML,
        "<|im_end|>", "<|im_start|>assistant\n",
    ),
}  # fmt: skip
"""A family's form of template, the token that closes its answers, and the end of its prompts. The architectures of
docs/guide/models.md and the families of public reports (trl 1.12.0, `trl/chat_templates`)."""

QUESTION = [{"role": "user", "content": "Where?"}]
SYSTEM = [{"role": "system", "content": "Be kind."}]
MARKERS = re.compile(r"<[|｜][^|｜<>\s]+[|｜]>|<\|\w+>|<\w+\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]")
PIECES = {"'<|' +": ["<|system|>", "<|user|>", "<|assistant|>"]}
"""Markers that a template writes in pieces."""


def tokenizer_of(template: str) -> Any:
    """Return a tokenizer of bytes whose special tokens are the markers that `template` writes."""
    pieces = [marker for text, markers in PIECES.items() if text in template for marker in markers]
    special = list(dict.fromkeys(["<s>", "</s>", *sorted(MARKERS.findall(template)), *pieces]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate([*special, *alphabet])}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", extra_special_tokens=special[2:]
    )
    tokenizer.chat_template = template
    return tokenizer


def loaded(template: str, **options: Any) -> Any:
    """Return the tokenizer of `template` as a run loads it."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer_of(template).save_pretrained(folder)
        return load_tokenizer(Path(folder), template=ChatTemplateConfig(**options))


def code(text: str) -> str:
    """Return `text` as code in a cell of a Markdown table, line breaks as `\\n`."""
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


class Reading(NamedTuple):
    """A row of the table."""

    result: str
    end: str = ""
    generation_prompt: str = ""
    system: str = ""


def _reason(error: UserError) -> str:
    return str(error).partition("can't be used: ")[2].partition(". Correct")[0]


def reading(template: str) -> Reading:
    """Return how a run reads `template`."""
    try:
        tokenizer = loaded(template)
    except UserError as error:
        return Reading("refused: " + re.sub(r"(<\S+>)", lambda m: code(m[1]), _reason(error)))
    if rendered_and_judged(tokenizer, QUESTION, ["Good day.", "No"])[1]:
        return Reading("refused by row: it does not render texts")
    prompt, own = (rendered_prompt(each, QUESTION) for each in (tokenizer, tokenizer_of(template)))
    common = len(prompt.rpartition(QUESTION[0]["content"])[0] + QUESTION[0]["content"])
    change = "its own" if prompt == own else f"{code(prompt[common:])} instead of {code(own[common:])}"
    with_system, refusal = rendered_and_judged(tokenizer, SYSTEM + QUESTION, ["Good day."])
    system = "refused" if refusal else "a turn" if SYSTEM[0]["content"] in with_system else "dropped"
    end = "EOS" if tokenizer.eos_token == "</s>" else code(tokenizer.eos_token)
    return Reading("read", end, change, system)


def shown(names: list[str]) -> list[str]:
    """Return `names` without the training templates that stand beside their own."""
    return [name for name in names if not name.endswith("_training") or name.removesuffix("_training") not in names]


def table(folder: Path) -> list[str]:
    """Return the rows of the table in Markdown: templates that are read alike stand in one row."""
    rows = {path.stem: reading(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.jinja"))}
    groups = itertools.groupby(sorted(rows, key=lambda name: rows[name]), key=lambda name: rows[name])
    return [f"| {', '.join(shown(sorted(names)))} | {' | '.join(row)} |" for row, names in groups]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    print("\n".join(table(parser.parse_args().folder)))
