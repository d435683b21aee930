"""Pairs whose columns have other names are not taken for another kind, and a hint names the fields to map them to."""

from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import write_rows
from components.data.config import DataConfig
from data_contracts.rows.reading_report import FileReading, reading_of

TWO = {"response_a": "tea", "response_b": "coffee"}


def reading(folder: Path, row: dict[str, Any], **options: Any) -> FileReading:
    write_rows(folder / "rows.jsonl", [{"prompt": f"question {i}"} | row for i in range(9)])
    return reading_of(folder / "rows.jsonl", DataConfig.model_validate(options))


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": "x"},
        {"a": "x", "b": "y"},
        TWO | {"annotator_id": 1},
        TWO | {"rater1": "a", "rater2": "b"},
        {"better_response": "x", "worse_response": "y"},
        {"answer": "x", "rejected_answer": "y"},
        {"output": "x", "negative_output": "y"},
        {"good": "x", "bad": "y"},
        {"y_w": "x", "y_l": "y"},
        {"Answer 1": "x", "Answer 2": "y", "overall preference": 1},
        {"answerA": "x", "answerB": "y"},
        {"completions": ["x", "y"], "rewards": [1, 2]},
    ],
)
def test_pairs_under_other_names_do_not_pass_as_another_kind(tmp_path: Path, row: dict[str, Any]) -> None:
    assert reading(tmp_path, row).mistaken


@pytest.mark.parametrize(
    "row",
    [
        {"id": 1},
        {"answer": "x"},
        {"option_1": "x", "option_2": "y"},
        {"chosen_model": "m", "rejected_model": "n"},
        {"good_id": "g", "bad_id": "b"},
        {"positive_score": 1, "negative_score": 2},
        {"first": 1, "second": 3},
        {"first": "1", "second": "3"},
        {"time_first_response": 3, "time_second_response": 4},
        {"answer": "x", "reference_answer": "y"},
    ],
)
def test_columns_that_are_no_responses_leave_prompts_prompts(tmp_path: Path, row: dict[str, Any]) -> None:
    found = reading(tmp_path, row | {"category": "a"})
    assert (found.kind, found.mistaken, found.ignored) == ("prompts", False, sorted(row))


@pytest.mark.parametrize(
    "row",
    [{"positive": 3, "negative": 1}, {"answer": "x", "correct_answer": "y"}, {"answer": "x", "right_answer": "y"}],
)
def test_demonstrations_with_votes_or_a_right_answer_are_no_pairs(tmp_path: Path, row: dict[str, Any]) -> None:
    found = reading(tmp_path, row | {"response": "z"})
    assert (found.kind, found.mistaken) == ("demonstrations", False)


@pytest.mark.parametrize(
    ("row", "option"),
    [
        ({"chosen": "x", "rejected": "y"}, "--set data.columns."),
        ({"response": "x"}, "--set data.demonstration_columns."),
        ({}, "data.prompt_columns"),
    ],
)
def test_a_hint_names_the_option_that_this_kind_reads(tmp_path: Path, row: dict[str, Any], option: str) -> None:
    assert option in str(reading(tmp_path, row | {"harmful": "no"}).as_json(tmp_path)["hint"])


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"chosen": "x", "rejected": "y"}, []),
        ({"response": "x"}, ["Demonstrations have"]),
        ({"response": "x", "negative_response": "y"}, ["Preferences have", "Demonstrations have"]),
        ({}, ["Preferences have", "Demonstrations have"]),
    ],
)
def test_a_hint_names_the_fields_that_unused_columns_may_be(tmp_path: Path, row: dict, fields: list[str]) -> None:
    hint = str(reading(tmp_path, row | {"rating": 3}).as_json(tmp_path)["hint"])
    assert "columns.FIELD=COLUMN" in hint
    assert [name for name in ("Preferences have", "Demonstrations have") if name in hint] == fields


def test_a_file_whose_columns_are_all_read_has_no_hint(tmp_path: Path) -> None:
    assert reading(tmp_path, {"chosen": "x", "rejected": "y"}).as_json(tmp_path)["hint"] is None
    assert reading(tmp_path, {"response": "x", "rating": 3}, score={"name": "rating"}).kind == "preferences"
