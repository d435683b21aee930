"""One search over all texts of a row finds every row in which one of its texts has something forbidden."""

import pytest

from components.data.rows import is_placeholder, marker, text_problems, unclean

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


@pytest.mark.parametrize(
    "text",
    [
        "nan", "NaN", " None\n", "NULL", "N/A", "NA", "<NA>", "#NAME?", "#N/A", "#DIV/0!", "#REF!", "Err:502",
        "undefined", "[deleted]", "[object Object]", "Error: Rate limit reached for requests", "ERROR: timeout",
        "error code: 1020",
        "openai.RateLimitError: Error code: 429 - {'error': {'message': 'Rate limit'}}", "Internal Server Error",
        "Error code: 500", "429 Too Many Requests", "HTTP/1.1 503 Service Unavailable", "Request timed out.",
        "Connection error.", '{"error": {"message": "quota", "type": "insufficient_quota"}}', "{'error': 'x'}",
        "[deleted by user]", "[Removed by Reddit]", "(null)", "<nil>", "NaT", "\\N", "#FIELD!", "ERROR",
        "503 Service Temporarily Unavailable", "Too many requests, please try again later.", "Rate limit exceeded",
        '{"object": "error", "message": "m"}', "Traceback (most recent call last):\n  File 1\nValueError: x",
    ],
)  # fmt: skip
def test_a_missing_value_or_an_error_as_a_response_is_found(text):
    assert is_placeholder(text)
    found = text_problems([{"role": "user", "content": "q"}], {"chosen": "a", "rejected": text}, 1000)
    assert [each.check for each in found] == ["no_placeholder"]


@pytest.mark.parametrize(
    "text",
    [
        "None of these.", "No", "Na", "A naan bread.", "Nothing", "null and void", "The error: you forgot a bracket.",
        "An error occurred because the list is empty.", '{"errors_found": 0}', '{"answer": 4}', "404", "Not available",
        "500 Internal organs", "errors", "Rate your day.", "500 Euros.", "450 Fifth Avenue", "500 Days Of Summer",
        "Rate limit your API with a token bucket.", "Service unavailable means that the server is overloaded.",
        "Too many requests were made, so wait a minute.", "Connection refused means that no process listens there.",
        "Internal server error is HTTP status 500.", "[deleted scenes]", "Error bars show one standard deviation.",
    ],
)  # fmt: skip
def test_an_answer_that_speaks_of_errors_is_a_response(text):
    assert not is_placeholder(text)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("F\u00fcr \u00e9", "Fu\u0308r e\u0301"), ("Hold it", "Hold\u200b it"), ("Hold it", "\ufeffHold it"),
        ("Hold it", "Hold\u00a0it"), ("Hold it", "Ho\u00adld it"), ("a\nb", "a\r\nb"), ("a\nb", "a\rb"),
        ("\u2764", "\u2764\ufe0f"),
        ("Hold it", "Hold it\u2060"), ("\ud55c", "\u1112\u1161\u11ab"),
    ],
)  # fmt: skip
def test_responses_that_look_the_same_are_not_a_pair(one, other):
    prompt = [{"role": "user", "content": "q"}]
    assert [p.check for p in text_problems(prompt, {"chosen": one, "rejected": other}, 99)] == ["responses_differ"]
    assert not text_problems(prompt, {"chosen": one, "rejected": f"{other}!"}, 99)
