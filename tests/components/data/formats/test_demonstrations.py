import pytest

from components.base.errors import UserError
from components.data.formats.demonstrations import detect, parse_demonstration
from components.data.rows import RawRow

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "good"}


def read(data):
    raw = RawRow(3, data)
    return parse_demonstration(raw, detect([raw], "x.jsonl"), "demonstrations", 1000)


@pytest.mark.parametrize(
    "data",
    [
        {"prompt": "hi", "response": "good"},
        {"prompt": [USER], "completion": "good"},
        {"prompt": "hi", "output": "good"},
        {"instruction": "hi", "input": "", "output": "good"},
        {"instruction": "hi", "instances": [{"input": "", "output": "good"}]},
        {"messages": [USER, ANSWER]},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}]},
        {"text": "\n\nHuman: hi\n\nAssistant: good"},
    ],
)
def test_every_format_gives_the_same_demonstration(data):
    row = read(data)
    assert row.problems == []
    assert row.item == {"prompt": [USER], "response": "good", "source": "demonstrations", "row": 3}


def test_an_input_follows_its_instruction():
    assert read({"instruction": "add", "input": "1 2", "output": "3"}).item["prompt"][0]["content"] == "add\n\n1 2"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"prompt": "hi", "response": ""}, "empty response: response"),
        ({"prompt": "hi", "response": None}, "`response` is missing"),
        ({"messages": [USER]}, "`messages` doesn't end with an assistant turn"),
        ({"messages": [ANSWER]}, "no turn before the response"),
        (
            {"instruction": "hi", "instances": []},
            "`instances` is not a list of one {input, output}; write a row for each",
        ),
        ({"instruction": " ", "output": "x"}, "empty prompt turn"),
    ],
)
def test_each_fault_of_a_row_is_named(data, reason):
    assert [p.text for p in read(data).problems] == [reason]


def test_unknown_fields_are_refused_with_those_found_and_those_expected():
    with pytest.raises(UserError, match=r"no demonstrations.*fields question.*`prompt` and `response`"):
        detect([RawRow(1, {"question": "x"})], "x.jsonl")
