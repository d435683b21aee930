"""Many conversations rendered together have the text that `apply_chat_template` gives each, or its error."""

import random

import pytest
from transformers.utils import chat_template_utils

from components.models.chat import rendering
from components.models.chat.rendering import FIXED, ManyRendered, rendered_conversation, rendered_prompt
from components.models.chat.templates import CHAT_TEMPLATES
from components.models.tokenizers import CHAT_TEMPLATE, train_tokenizer

# What published templates do: SmolLM2's default system message, Llama 3's dates and unset fields, Qwen 3's reversed
# search and thoughts that are cut, Mistral's turns joined by `namespace` and refusals, generation blocks, JSON.
PUBLISHED = {
    "smollm2": (
        "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system\nHelp.\n"
        "{% endif %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama": (
        "{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{% if tools is none %}none"
        "{% endif %}{% if documents is none %}no documents{% endif %}{{ date_string }}"
        "{%- for m in messages %}{{- m.role + ': ' + m['content'] | trim + eos_token }}"
        "{%- if m.thinking is defined or m.get('reasoning_content') %}thought{% endif %}{%- endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "qwen 3": (
        "{%- set ns = namespace(last=messages|length - 1) %}{%- for m in messages[::-1] %}{%- if m.role == 'user' %}"
        "{%- set ns.last = messages|length - loop.index0 %}{%- endif %}{%- endfor %}{%- for m in messages %}"
        "{%- if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
        "{%- else %}{{ m.content }}{%- endif %}{%- endfor %}{{ messages | tojson }}"
    ),
    "generation": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{{ pad_token }}{% if loop.last %}{% break %}{% endif %}{% endfor %}"
    ),
    "refusing": "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}{{ messages }}",
    "changing messages": "{{ messages.append(messages[0]) }}",
}
TEXTS = [
    "", " ", "a <b> & 'c'", "{{ eos_token }}", "hm</think> so", "\n\n{% raw %}", "漢字 🙂\u2028", "<|end|>",
    '\x00\r\n\t"\\',
]  # fmt: skip


def conversations(count):
    rng = random.Random(5)
    for number in range(count):
        first = [{"role": "system", "content": rng.choice(TEXTS)}] if number % 3 == 1 else []
        roles = ("user", "assistant") * rng.randint(0, 3)
        yield [
            *first, *({"role": role, "content": "".join(rng.choices(TEXTS, k=2))} for role in (*roles, "user"))
        ]  # fmt: skip


def outcome(call, *args):
    try:
        return call(*args)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, *CHAT_TEMPLATES.values(), *PUBLISHED.values()])
def test_conversations_rendered_together_have_the_text_or_error_that_transformers_gives_each(template, caplog):
    tokenizer = train_tokenizer(["the river runs"], 300)
    tokenizer.chat_template = template
    many, talks = ManyRendered(tokenizer), list(conversations(60))
    for one, all_ in ((rendered_prompt, many.prompts), (rendered_conversation, many.conversations)):
        expected = [outcome(one, tokenizer, talk) for talk in talks]
        outcome(all_, talks[:2])  # compared with apply_chat_template
        found = [outcome(all_, [talk]) for talk in talks]
        assert found == [[each] if isinstance(each, str) else each for each in expected]
        if all(isinstance(each, str) for each in expected):
            assert all_(talks) == expected
    assert many._template is not None, "the compiled template rendered them"
    assert not caplog.text


@pytest.mark.parametrize("lacking", [True, False])
def test_a_transformers_that_prepares_messages_otherwise_renders_them_itself(lacking, monkeypatch, caplog):
    tokenizer, talks = train_tokenizer(["the river runs"], 300), list(conversations(6))
    if lacking:
        monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
        tokenizer.apply_chat_template = lambda talks, **_: [f"rendered {talk[-1]['content']}" for talk in talks]
    else:
        prepared = tokenizer.apply_chat_template
        tokenizer.apply_chat_template = lambda talks, **more: [f"{text}!" for text in prepared(talks, **more)]
    many = ManyRendered(tokenizer)
    expected = tokenizer.apply_chat_template(talks, tokenize=False, add_generation_prompt=True, **FIXED)
    assert [many.prompts(talks), many.prompts(talks)] == [expected] * 2
    assert len(caplog.records) == 1 and caplog.records[0].name == rendering.__name__
