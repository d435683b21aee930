"""One search over all texts of a row finds every row in which one of its texts has something forbidden."""

import pytest

from components.data.rows import marker, text_problems, unclean

FORBIDDEN = [
    "Human: hi", " \n\u200bAssistant: hi", "a\n\nHuman: b", "<|im_start|>", "</s>", "[INST]", "<<SYS>>",
    "<start_of_turn>", "### Response:", "### Human: hi", "<\uff5cUser\uff5c>",
    "<\uff5cbegin\u2581of\u2581text\uff5c>", "<eos>", "a\x00", "\x7f", "\x9f", "\ufffd", "\udc80",
]  # fmt: skip
ALLOWED = ["Human", "a Human: b", "\n", "", "<|", "|>", "##", "# Response:", "tab\tand\r\nline", "漢字"]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("text", FORBIDDEN)
def test_whichever_text_of_a_row_has_something_forbidden_is_found_and_named(text, place):
    texts = ["a"] * 4
    texts[place] = text
    prompt = [{"role": role, "content": said} for role, said in zip(("system", "user"), texts, strict=False)]
    found = text_problems(prompt, {"chosen": texts[2], "rejected": f"{texts[3]} "}, 1000)
    name = ("prompt turn 1", "prompt turn 2", "chosen", "rejected")[place]
    assert any(each.check in ("text_clean", "no_markers") and each.text.endswith(f" in {name}") for each in found)


@pytest.mark.parametrize("text", ALLOWED)
@pytest.mark.parametrize("other", ALLOWED)
def test_texts_that_are_allowed_by_themselves_are_allowed_together(text, other):
    assert not (unclean(text) or marker(text))
    found = text_problems([{"role": "user", "content": text}], {"chosen": other, "rejected": "b"}, 1000)
    assert not [each for each in found if each.check in ("text_clean", "no_markers")]
