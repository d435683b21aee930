import json
from functools import partial

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


def test_a_system_text_and_alpacas_history_come_before_the_prompt():
    earlier = {"system": "Be brief.", "history": [["one?", "1"]]}
    turns = [("system", "Be brief."), ("user", "one?"), ("assistant", "1"), ("user", "hi")]
    for asked in ({"instruction": "hi", "output": "good"}, {"conversations": [{"from": "human", "value": "hi"},
                  {"from": "gpt", "value": "good"}]}, {"prompt": "hi", "response": "good"}):  # fmt: skip
        prompt = read(asked | earlier).item["prompt"]
        assert [(m["role"], m["content"]) for m in prompt] == turns
    assert read({"instruction": "hi", "output": "x", "history": ["one?"]}).problems[0].text.startswith("`history` is")


KTO_ROWS = [
    {"prompt": "hi", "completion": "good", "label": True},
    {"prompt": [USER], "completion": [ANSWER], "label": True},
    {"messages": [USER, ANSWER], "label": True},
    {"instruction": "hi", "input": "", "output": "good", "kto_tag": True},
    {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "good"}], "kto_tag": "true"},
]


@pytest.mark.parametrize("data", KTO_ROWS)
def test_the_undesirable_half_of_kto_data_is_never_imitated(data):
    assert read(data).problems == [] and read(data).item["response"] == "good"
    label = "label" if "label" in data else "kto_tag"
    bad = read(data | {label: False})
    assert [tuple(problem) for problem in bad.problems] == [("desirable", "labelled undesirable (KTO)")]


def test_numbers_of_kto_labels_are_refused_until_their_meaning_is_said():
    raw = RawRow(3, {"prompt": "hi", "completion": "good", "label": 1})
    assert detect([raw], "x.jsonl") == "KTO"
    (problem,) = parse_demonstration(raw, "KTO", "demonstrations", 1000).problems
    assert "`label` is 1" in problem.text and "data.label_values" in problem.text
    for meaning, problems in (("desirable", []), ("undesirable", ["desirable"])):
        row = parse_demonstration(raw, "KTO", "demonstrations", 1000, {"1": meaning})
        assert [p.check for p in row.problems] == problems


@pytest.mark.parametrize("labels", [("good", "bad"), ("chosen", "rejected"), (1, -1), ("thumbs_up", "thumbs_down")])
def test_words_that_judge_responses_are_labels_whose_meaning_must_be_said(labels):
    rows = [RawRow(n, {"prompt": "hi", "completion": "x", "label": label}) for n, label in enumerate(labels, 1)]
    assert detect(rows, "x.jsonl") == "KTO"
    meanings = dict(zip(map(str, labels), ("desirable", "undesirable"), strict=True))
    for given, checks in (({}, ["fields_present"] * 2), (meanings, [None, "desirable"])):
        found = [parse_demonstration(row, "KTO", "demonstrations", 1000, given).problems for row in rows]
        assert [problems[0].check if problems else None for problems in found] == checks


@pytest.mark.parametrize("name", ["is_safe", "is_correct", "thumbs_up"])
def test_a_flag_of_another_name_that_says_false_keeps_the_response_out(name):
    rows = [RawRow(n, {"prompt": "hi", "response": "x", "label": "billing", name: n == 1}) for n in (1, 2)]
    assert detect(rows, "x.jsonl") == "KTO"
    assert [[p.check for p in read(dict(row.data)).problems] for row in rows] == [[], ["desirable"]]


@pytest.mark.parametrize(
    "labels", [("good", "bad", "neutral"), (0, 1, "unsure"), (True, False, None), ("up", "down", " ")]
)
def test_one_label_of_no_known_meaning_does_not_make_demonstrations_of_the_undesirable_rows(labels):
    rows = [RawRow(n, {"prompt": "hi", "completion": "x", "label": label}) for n, label in enumerate(labels, 1)]
    assert detect(rows, "x.jsonl") == "KTO"
    meanings = {"good": "desirable", "bad": "undesirable", "1": "desirable", "0": "undesirable", "up": "desirable",
                "down": "undesirable"}  # fmt: skip
    found = [parse_demonstration(row, "KTO", "demonstrations", 1000, meanings).problems for row in rows]
    assert [problem.check for problem in found[2]] == ["fields_present"] and "`label` is" in found[2][0].text
    assert sorted(tuple(problem.check for problem in problems) for problems in found[:2]) == [(), ("desirable",)]


def test_ratings_and_classes_called_label_are_not_taken_for_desirable_or_not():
    for labels in ((0, 1, 2, 3, 4), (1, 1, 1, 5), ("good", "1", "2")):
        rows = [RawRow(n, {"prompt": "hi", "completion": "x", "label": label}) for n, label in enumerate(labels, 1)]
        assert detect(rows, "x.jsonl") == "response"


@pytest.mark.parametrize(("weight", "checks"), [(0, ["desirable"]), (1, []), (None, [])])
def test_a_last_message_of_weight_0_is_not_imitated(weight, checks):
    earlier = [USER, ANSWER | {"weight": 0}]
    row = read({"messages": [*earlier, USER, ANSWER | {"weight": weight}]})
    assert [problem.check for problem in row.problems] == checks


def test_a_category_called_label_is_no_judgement_of_the_response_and_a_stray_false_is():
    rows = [{"prompt": "hi", "response": "good", "label": name} for name in ("billing", "returns")]
    assert [read(row).problems for row in rows] == [[], []] and detect([RawRow(1, rows[0])], "x") == "response"
    assert [p.check for p in read(rows[0] | {"label": False}).problems] == ["desirable"]


@pytest.mark.parametrize("name", ["input", "context"])
def test_an_input_or_a_context_follows_its_instruction(name):
    assert read({"instruction": "add", name: "1 2", "output": "3"}).item["prompt"][0]["content"] == "add\n\n1 2"


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


@pytest.mark.parametrize("name", ["image", "images", "videos", "audio"])
def test_a_row_that_shows_something_is_refused_since_only_its_text_would_be_learned(name):
    (problem,) = read({"messages": [USER, ANSWER], name: ["cat.png"]}).problems
    assert problem.check == "turns_valid" and f"`{name}` belongs to the prompt" in problem.text
    assert read({"messages": [USER, ANSWER], name: []}).problems == []


@pytest.mark.parametrize("written", [json.dumps, partial(json.dumps, indent=1), str])
def test_messages_written_as_a_text_are_not_learned_as_one(written):
    text = written([USER, ANSWER])
    for row in ({"prompt": text, "response": "x"}, {"prompt": "hi", "response": text}):
        (problem,) = read(row).problems
        assert problem.check == "turns_valid" and "is a list of messages written as text" in problem.text
    assert read({"prompt": "hi", "response": f"Send this: {text}"}).problems == []
    assert read({"prompt": "hi", "response": '[{"role": "user"}, 1]'}).problems == []


def test_unknown_fields_are_refused_with_those_found_and_those_expected():
    with pytest.raises(UserError, match=r"are not demonstrations.*in 1 row are question.*`prompt` and `response`"):
        detect([RawRow(1, {"question": "x"})], "x.jsonl")


def test_scored_responses_are_refused_as_demonstrations_with_what_to_do():
    rows = [
        RawRow(n, {"prompt": f"ask {n // 2}", "response": f"answer {n}", "helpfulness": n % 5}) for n in range(1, 9)
    ]
    with pytest.raises(UserError, match=r"scores\.jsonl: its rows are scored responses.*Give the file as data\.pref"):
        detect(rows, "scores.jsonl")
    assert detect([row._replace(data={"prompt": "a", "response": "b"}) for row in rows], "x") == "response"
