import json
import os
import socket
import threading

import pytest

from components.data.rows import Problem, Row
from components.data.splits import prompt_key
from components.errors import CheckFailed
from data_contracts import suites
from data_contracts.data_docs import write_data_docs
from data_contracts.frames import length_preference, pair_frame, row_frame


@pytest.fixture(scope="module")
def context():
    return suites.context()


def rows(bad, of=100, check="prompts_agree"):
    return [Row("preferences", n, problems=[Problem(check, "x")] if n <= bad else []) for n in range(1, of + 1)]


NAMES = (f"suite{n}" for n in range(1000))


def judged(context, frame, checks):
    outcomes = suites.judge(context, suites.Suite(next(NAMES), frame, checks))
    return {outcome["check"]: outcome for outcome in outcomes}


@pytest.mark.parametrize(("bad", "passed"), [(0, True), (5, True), (6, False)])
def test_a_row_check_fails_once_more_than_the_tolerated_share_of_rows_fail_it(context, bad, passed):
    outcomes = judged(context, row_frame(rows(bad)), suites.row_checks(0.05, pairs=True))
    found = outcomes.pop("prompts_agree")
    assert (found["passed"], found["rows"], found["severity"]) == (passed, bad, "error")
    assert found["first_rows"] == list(range(1, bad + 1))
    assert all(outcome["passed"] and outcome["rows"] == 0 for outcome in outcomes.values())


@pytest.mark.parametrize("check", [name for name, _, _ in suites.ROW_CHECKS])
def test_every_row_check_sees_its_own_fault(context, check):
    outcomes = judged(context, row_frame(rows(50, check=check)), suites.row_checks(0.05, pairs=True))
    assert [name for name, outcome in outcomes.items() if not outcome["passed"]] == [check]


def test_a_report_of_many_bad_rows_names_the_first_ten_and_is_plain_json(context):
    found = judged(context, row_frame(rows(90)), suites.row_checks(0.05, pairs=True))["prompts_agree"]
    assert found["rows"] == 90 and found["first_rows"] == list(range(1, 11))
    assert json.loads(json.dumps(found)) == found


def pair(text, row, chosen="one two", rejected="one"):
    return {"prompt": [{"role": "user", "content": text}], "chosen": chosen, "rejected": rejected, "row": row}


def clean():
    sizes = {"train": 300, "calibration": 50, "test": 200}
    out, row = {}, 0
    for name, size in sizes.items():
        out[name] = []
        for _ in range(size):
            row += 1
            out[name].append(pair(f"{name} {row}", row) if row % 2 else pair(f"{name} {row}", row, "one", "one two"))
    return out


def outcomes_of(context, pairs, first_wins=None, stands_in=None):
    if stands_in is None:
        stands_in = {prompt_key(p["prompt"]): {name} for name, found in pairs.items() for p in found}
    frame = pair_frame(pairs, stands_in, first_wins or {})
    return {n: o["passed"] for n, o in judged(context, frame, suites.pair_checks(frame)).items()}


def test_clean_pairs_pass_every_check(context):
    pairs = clean()
    outcomes = outcomes_of(context, pairs, {row: row % 2 == 0 for row in range(1, 551)})
    assert len(outcomes) == 6 and all(outcomes.values())


def failing(context, pairs, **more):
    return [name for name, passed in outcomes_of(context, pairs, **more).items() if not passed]


def test_a_prompt_in_two_splits_fails_the_contract(context):
    pairs = clean()
    stands_in = {prompt_key(p["prompt"]): {name} for name, found in pairs.items() for p in found}
    stands_in[prompt_key(pairs["test"][0]["prompt"])].add("train")
    assert failing(context, pairs, stands_in=stands_in) == ["no_leak"]


def test_a_split_without_pairs_fails_the_contract(context):
    assert failing(context, clean() | {"calibration": []}) == ["every_split"]


def test_few_test_pairs_warn(context):
    pairs = clean()
    assert failing(context, pairs | {"test": pairs["test"][:199]}) == ["enough_test_pairs"]


def test_a_test_prompt_that_is_nearly_a_training_prompt_warns(context):
    pairs = clean()
    pairs["test"].append(pair("Train  1!", 551))
    assert failing(context, pairs) == ["no_near_duplicate"]


def test_a_length_that_decides_alone_warns(context):
    pairs = {name: [pair(p["prompt"][0]["content"], p["row"]) for p in found] for name, found in clean().items()}
    assert failing(context, pairs) == ["length_preference"]
    assert length_preference([p for found in pairs.values() for p in found]) == 1.0


def test_pairs_of_equal_length_say_nothing_of_a_preference_for_length():
    assert length_preference([pair("a", 1, "x", "y")]) is None
    assert length_preference([pair("a", 1, "x", "y"), pair("a", 2), pair("a", 3, "z", "x y")]) == 0.5


def test_a_response_shown_first_that_always_wins_warns(context):
    assert failing(context, clean(), first_wins=dict.fromkeys(range(1, 551), True)) == ["label_position"]


def test_a_check_that_great_expectations_cannot_judge_is_no_pass(context):
    check = suites.Check("lost", "no_such_column", "x", "error", "ExpectColumnValuesToBeInSet", {"value_set": [True]})
    with pytest.raises(CheckFailed, match="could not judge lost"):
        judged(context, row_frame(rows(0)), [check])


def test_responses_of_equal_length_everywhere_are_no_fault(context):
    pairs = {
        name: [pair(p["prompt"][0]["content"], p["row"], "x", "y") for p in found] for name, found in clean().items()
    }
    assert failing(context, pairs) == []


def test_judging_and_its_pages_ask_nobody_for_anything(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError(f"the network was asked: {args}")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fresh = suites.context()
    checks = suites.judge(fresh, suites.Suite("alone", row_frame(rows(1)), suites.row_checks(0.05, pairs=True)))
    write_data_docs(fresh, tmp_path / "docs", checks, {})
    assert os.environ["GX_ANALYTICS_ENABLED"] == "False"
