"""What is done for many texts at once is what is done for each by itself."""

import random

import numpy as np
import pytest

from components.models.chat.endings import endings_of
from components.models.tokenizers import train_tokenizer
from data_contracts.findings import texts as read
from data_contracts.findings.encoding import Encoder
from data_contracts.findings.near import runs_of_words, signatures

SAID = "the river runs past an old bridge and nobody asks why it does".split()
REFUSING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHANGING = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'].split('</think>')[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

WITHOUT_SYSTEM = CHANGING.replace("in messages", "in messages if m['role'] != 'system'")
WITHOUT_SYSTEM = WITHOUT_SYSTEM.replace(".split('</think>')[-1]", "")
WITHOUT_TEXT = CHANGING.replace("m['content']", "''")


def rows(count, rng):
    def text():
        return " ".join(rng.choice(SAID) for _ in range(rng.randint(1, 12)))

    for number in range(count):
        first = [{"role": "system", "content": text()}] if number % 7 == 3 else []
        thought = "hm</think> " if number % 5 == 2 else ""
        asked = [*first, {"role": "user", "content": text()}]
        yield {"prompt": asked, "chosen": thought + text(), "rejected": f" {text()} "}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (None, {None}), (REFUSING, {None, "template_takes"}), (CHANGING, {None, "template_agrees"}),
        (WITHOUT_SYSTEM, {None, "template_takes"}), (WITHOUT_TEXT, {"template_agrees"}),
    ],
)
def test_rows_rendered_in_one_call_are_judged_as_each_by_itself(template, expected):
    tokenizer = train_tokenizer([" ".join(SAID)], 400)
    tokenizer.chat_template = template or tokenizer.chat_template
    items, sides = list(rows(40, random.Random(4))), ["chosen", "rejected"]
    alone = [read.rendered_and_judged(tokenizer, row["prompt"], [row[side] for side in sides]) for row in items]
    assert read._all_rendered(tokenizer, items, sides, endings_of(tokenizer)) == alone
    assert {problem and problem.check for _, problem in alone} == expected


def test_responses_are_the_same_once_cut_where_their_first_tokens_and_their_end_are():
    tokenizer = train_tokenizer([" ".join(SAID)], 400)

    def same(one, other, cap=3):
        encode = Encoder(tokenizer)
        return read._same_cut(encode([one]), encode([other]), cap)[0]

    assert same("the river runs past", "the river runs past an old")
    assert same("the river runs", "the river runs past"), "neither has room for its EOS"
    assert not same("the river", "the river runs"), "the shorter one ends"
    assert not same("the river runs past", "the river past runs")
    assert same("the river", "the river") and not same("the river", "the bridge")


def test_the_signature_of_prompt_and_responses_is_the_lesser_of_both_parts():
    rng = random.Random(1)
    one, other = (
        [runs_of_words(" ".join(rng.choice(SAID) for _ in range(rng.randint(1, 40))), 3) for _ in range(50)]
        for _ in range(2)
    )
    together = signatures([a + b for a, b in zip(one, other, strict=True)])
    assert np.array_equal(np.minimum(signatures(one), signatures(other)), together)
