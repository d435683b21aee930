import re

from hypothesis import given
from hypothesis import strategies as st

from components.data.words import folded
from components.human_eval.batch.halves import may_train


def asked(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_half_of_all_prompts_may_train() -> None:
    share = sum(may_train(asked(f"order {n}")) for n in range(4000)) / 4000
    assert 0.47 < share < 0.53


def test_a_prompt_never_changes_its_half() -> None:
    assert [may_train(asked(f"prompt {n}")) for n in range(12)] == [
        False, True, False, False, True, False, False, True, False, False, True, True
    ]  # fmt: skip


@given(st.text().filter(lambda text: re.search(r"\w", folded(text))))
def test_variants_of_a_prompt_stay_in_its_half(text: str) -> None:
    assert may_train(asked(text)) == may_train(asked(f"  {text} !\n")) == may_train(asked(f"{text}."))


def test_prompts_of_symbols_alone_are_no_variants_of_each_other() -> None:
    symbols = [chr(code) for code in range(ord("!"), ord("0"))]
    assert len({may_train(asked(symbol)) for symbol in symbols}) == 2
