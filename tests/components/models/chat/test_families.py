"""Chat templates in the form of each family that the guide lists: ends, what stands before an answer, dates."""

import random
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from components.base.errors import UserError
from components.models.chat import templates
from components.models.chat.rendering import rendered_conversation, rendered_prompt
from components.models.tokenizers import load_tokenizer
from data_contracts.findings.texts import rendered_and_judged
from tests.chat_templates import (
    CHATML,
    COHERE,
    FORMS,
    GEMMA,
    LLAMA3,
    MISTRAL,
    PHI3,
    QWEN3,
    THOUGHT,
    TURNS,
    loaded,
    table,
    tokenizer_of,
)

Q, A = [{"role": "user", "content": "Where?"}], "Good day."
LONGER = [*Q, {"role": "assistant", "content": "Here."}, {"role": "user", "content": "Really?"}]


@pytest.mark.parametrize("family", FORMS)
def test_a_prompt_and_an_answer_are_the_conversation(family: str, tmp_path: Path) -> None:
    template, end, ends_with = FORMS[family]
    tokenizer = loaded(template)
    assert tokenizer.eos_token == end
    assert rendered_prompt(tokenizer, Q).endswith(ends_with)
    for messages in (Q, LONGER):
        whole = rendered_conversation(tokenizer, [*messages, {"role": "assistant", "content": A}])
        space, line = " " * family.endswith("0.1"), "\n" * (family == "GPT-2")
        assert whole.startswith(rendered_prompt(tokenizer, messages) + space + A + line + end)
        assert rendered_and_judged(tokenizer, messages, [A, "No"])[1] is None
    tokenizer.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = theirs.apply_chat_template(Q, tokenize=False, add_generation_prompt=True)
    assert text == rendered_prompt(tokenizer, Q), "plain transformers asks the exported model with the same prompt"
    assert load_tokenizer(tmp_path).chat_template == tokenizer.chat_template, "loaded again, nothing is added twice"


@pytest.mark.parametrize("start", ["", "<s>", "[BEGIN]", "<sop>"])
@pytest.mark.parametrize("token", ["<|user|>", "<|assistant|>"])
def test_a_token_that_begins_a_turn_never_becomes_eos(token: str, start: str) -> None:
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{# <|user|><|assistant|> #}"
    template = start + turns + token
    refusal = re.escape(f"writes {token}, which begins a turn") + ".*sft.chat_template=FILE"
    with pytest.raises(UserError, match=refusal):
        loaded(template)


@pytest.mark.parametrize(("template", "reason"), [
    (CHATML.replace("<|im_start|>{{", "{{ messages | length }}<|im_start|>{{"), "changes where an answer follows"),
    (TURNS.replace("\n{{ m['content']", "{{ messages | length }}\n{{ m['content']"), "changes where an answer follows"),
    ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ loop.index }}: {{ m.content }}"
     "<|im_end|>{% endif %}{% endfor %}", r"depends on the conversation \(.2: ., .3: ., .4: .\)"),
])  # fmt: skip
def test_what_stands_before_an_answer_is_constant_or_refused(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{reason}.* give another one as sft\.chat_template=FILE"):
        loaded(template)


def test_a_variable_of_the_template_is_set_and_exported(tmp_path: Path) -> None:
    tokenizer = loaded(QWEN3, template_variables={"enable_thinking": False})
    assert rendered_prompt(tokenizer, Q).endswith(THOUGHT)
    tokenizer.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.apply_chat_template(Q, tokenize=False, add_generation_prompt=True).endswith(THOUGHT)
    values = {"effort": "it's {{ 'low' }} %}", "level": 0.5}
    effort = loaded("{{ effort }} {{ level }}" + CHATML, template_variables=values)
    assert rendered_prompt(effort, Q).startswith("it's {{ 'low' }} %} 0.5<|im_start|>")
    for name in ("enable_thinkin", "messages", "date_string"):
        with pytest.raises(UserError, match=rf"^sft\.template_variables\.{name}: .*Correct the name"):
            loaded(LLAMA3, template_variables={name: False})


@pytest.mark.parametrize("family", ["Gemma", "Mistral"])
def test_a_system_message_that_is_refused_goes_into_the_question(family: str) -> None:
    template, _, ends_with = FORMS[family]
    talk = [{"role": "system", "content": "Be kind."}, *LONGER]
    refused = rendered_and_judged(loaded(template), talk, [A])[1]
    assert refused is not None and refused.check == "template_takes"
    tokenizer = loaded(template, system_in_question=True)
    prompt, problem = rendered_and_judged(tokenizer, talk, [A])
    assert problem is None
    merged = [{"role": "user", "content": "Be kind.\n\nWhere?"}, *LONGER[1:]]
    assert prompt == rendered_prompt(loaded(template), merged)
    assert rendered_prompt(tokenizer, LONGER) == rendered_prompt(loaded(template), LONGER)
    assert rendered_prompt(tokenizer, Q).endswith(ends_with)


@pytest.mark.parametrize(("begins", "expected"), [
    ("{{ strftime_now('%d') }} {{ strftime_now(\"%B %d, %Y\") }} ", "26 July 26, 2024 "),
    ("{% if strftime_now is defined %}{% set d = strftime_now('%d %b %Y') %}{% endif %}{{ d }} ", "26 Jul 2024 "),
    ("{% set f = '%' %}{{ strftime_now(f + 'Y') }} ", "26 Jul 2024 "),
    ("{%- macro now() %}{{ date_string }}{% endmacro %}{{ now() }} ", "26 Jul 2024 "),
    ("{{ ['x', 'y', 'z'] |  random }}{{ ' | random ' }}", "x | random "),
    ("{{ lipsum(n=9) }}| random ", "| random "),
    ("\n  {% if true %}a{% endif %}\n", "\na"),
])  # fmt: skip
def test_a_template_gets_one_date_and_no_chance(begins: str, expected: str, tmp_path: Path) -> None:
    tokenizer = loaded(begins + CHATML)
    tokenizer.save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for seed in range(3):
        random.seed(seed)
        for text in (rendered_prompt(tokenizer, Q), theirs.apply_chat_template(Q, tokenize=False)):
            assert text.startswith(expected + "<|im_start|>user\nWhere?")


def test_a_template_that_needs_no_change_is_exported_unchanged() -> None:
    for template in (CHATML, COHERE, PHI3 + "\n", GEMMA, MISTRAL):
        assert loaded(template).chat_template == template


TRL = Path(__file__).parents[4] / ".tether" / "trl" / "trl" / "chat_templates"


@pytest.mark.skipif(not TRL.is_dir(), reason="make chat-templates downloads TRL's wheel")
@pytest.mark.whole
def test_the_guides_table_of_families_is_measured() -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    assert "\n".join(table(TRL)) in guide


def test_only_an_answer_that_stands_unchanged_is_looked_at() -> None:
    tokenizer = tokenizer_of("{{ messages[0]['content'] }}")
    assert templates.renderings(tokenizer) == [] and templates.turn_end(tokenizer) is None
    assert templates.completed_template(tokenizer) == tokenizer.chat_template
