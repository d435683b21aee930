"""JSON that a value can't hold is told from JSON that is none, and an array's elements are found without reading it."""

import json

import pytest

from components.base.strict_json import BadJson, elements, parse_json


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("9" * 5000, "too many digits"),
        ("NaN", "NaN is not a JSON value"),
        ('{"a": {"b": 1, "b": 2}}', "a key appears twice: 'b'"),
    ],
)
def test_json_that_cannot_be_held_is_told_from_what_breaks_its_grammar(text: str, said: str) -> None:
    with pytest.raises(BadJson, match=said) as error:
        parse_json(text)
    assert error.value.line is None
    with pytest.raises(BadJson) as error:
        parse_json('{"a":\n 1')
    assert error.value.line == 2


@pytest.mark.parametrize("rows", [[], [1], [{"a": [1, {"b": "],["}]}, 'x"y,', [[]], {}, None]])
def test_the_elements_of_an_array_are_found_by_its_brackets(rows: list) -> None:
    assert [json.loads(text) for text in elements(json.dumps(rows)) if text.strip()] == rows
    assert list(elements('[{"a": 1}, {"b": "x')) == ['{"a": 1}', ' {"b": "x'], "one that breaks off keeps its last"
