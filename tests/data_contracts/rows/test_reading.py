"""A hint is given for what the values are, and following hints to the end never makes a wrong pair."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.config import DataConfig
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.reading import reading_of

TWO = {"response_a": "tea it is", "response_b": "coffee it is"}
OPTION = re.compile(r"--set (.*)\.$")


def rows_of(row: dict[str, Any], **values: Any) -> list[dict[str, Any]]:
    """Twelve rows with their own texts; a function gives a column's value in row i."""
    texts = {name: f"{value} {{}}" for name, value in row.items()}
    return [
        {"prompt": f"question {i}"} | {name: text.format(i) for name, text in texts.items()}
        | {name: value(i) if callable(value) else value for name, value in values.items()}
        for i in range(12)
    ]  # fmt: skip


def followed(folder: Path, rows: list[dict[str, Any]]) -> tuple[str, dict[str, Any], str]:
    """The kind, the columns and the last hint, once every hint that names columns is followed."""
    path, columns = folder / "rows.jsonl", {}
    write_rows(path, rows)
    for _ in range(4):
        kind = "none"
        try:
            reading = reading_of(path, DataConfig.model_validate({"columns": columns}))
            kind, hint = reading.kind, str(reading.as_json(path)["hint"] or "")
        except UserError as error:
            hint = str(error)
        told = OPTION.search(hint)
        if told is None:
            break
        (option,) = shlex.split(told[1])  # as the shell would
        name, _, value = option.removeprefix("data.columns").partition("=")
        columns |= {name.removeprefix("."): yaml.safe_load(value)} if name else yaml.safe_load(value)
    return kind, columns, hint


@pytest.mark.parametrize(
    "values",
    [
        {"annotator_id": lambda i: 1 + i % 2},
        {"worker": lambda i: f"w{i % 3}"},
        {"rater1": 17, "rater2": 23},
        {"rater1": 1, "rater2": 2},
        {"rater_1": lambda i: 1 + i % 3, "rater_2": lambda i: 1 + (i + 1) % 3},
        {"judge_name": "m", "label_id": lambda i: i},
        {"vote_time": lambda i: 10.5 + i},
        {"preference_reason": lambda i: f"It is better in {i} ways."},
        {"choice_by": lambda i: i % 2},
        {"response_a_model": "m", "response_b_model": "n", "model_label": lambda i: i % 2},
    ],
)
def test_ids_of_people_and_rows_never_become_votes(tmp_path: Path, values: dict[str, Any]) -> None:
    kind, columns, hint = followed(tmp_path, rows_of(TWO, **values))
    assert (kind, columns) == ("prompts", {}) and hint.startswith("It has columns of preferences")


@pytest.mark.parametrize(
    "values",
    [
        {"chosen_model": "m", "rejected_model": "n"},
        {"good_id": lambda i: f"g{i}", "bad_id": lambda i: f"b{i}"},
        {"positive_score": lambda i: i, "negative_score": lambda i: i + 1},
        {"prompt_id": lambda i: f"p{i}"},
    ],
)
def test_columns_about_responses_are_not_suggested_as_them(tmp_path: Path, values: dict[str, Any]) -> None:
    kind, columns, _ = followed(tmp_path, rows_of({}, **values))
    assert (kind, columns) == ("prompts", {})
    pairs = [{k.replace("prompt", "text") if k == "prompt" else k: v for k, v in row.items()}
             for row in rows_of({"chosen": "yes", "rejected": "no"}, prompt_id=lambda i: f"p{i}")]  # fmt: skip
    assert followed(tmp_path, pairs)[1].get("prompt") != "prompt_id"


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"answer": "good", "rejected_answer": "bad"}, {"chosen": "answer", "rejected": "rejected_answer"}),
        ({"response": "good", "rejected": "bad"}, {"chosen": "response", "rejected": "rejected"}),
        ({"output": "good", "negative_output": "bad"}, {"chosen": "output", "rejected": "negative_output"}),
        ({"y_w": "good", "y_l": "bad"}, {"chosen": "y_w", "rejected": "y_l"}),
        ({"response_w": "good", "response_l": "bad"}, {"chosen": "response_w", "rejected": "response_l"}),
        ({"better": "good", "worse": "bad"}, {"chosen": "better", "rejected": "worse"}),
    ],
)
@pytest.mark.parametrize("asked", ["prompt", "question", "user_prompt", "user's question"])
def test_a_pair_known_by_its_worse_column_gets_the_mapping(
    tmp_path: Path, row: dict[str, str], columns: dict[str, str], asked: str
) -> None:
    rows = [{asked if k == "prompt" else k: v for k, v in each.items()} for each in rows_of(row)]
    kind, found, _ = followed(tmp_path, rows)
    assert kind == "preferences" and {name: found[name] for name in columns} == columns
    source = RowSource.named("preferences", tmp_path / "rows.jsonl", DataConfig.model_validate({"columns": found}))
    for i, each in enumerate(judged_rows(source, 1000)):
        assert each.item is not None and not each.problems
        assert (each.item["prompt"][-1]["content"], each.item["chosen"], each.item["rejected"]) == (
            f"question {i}", f"good {i}", f"bad {i}",
        )  # fmt: skip


def test_a_system_prompt_is_not_suggested_as_the_prompt(tmp_path: Path) -> None:
    rows = [{"system_prompt": "Be brief.", "user_prompt": row.pop("prompt")} | row
            for row in rows_of({"better": "good", "worse": "bad"})]  # fmt: skip
    assert followed(tmp_path, rows)[1]["prompt"] == "user_prompt"


def test_ranks_are_not_suggested_as_scores(tmp_path: Path) -> None:
    rows = rows_of({}, generations=lambda i: [f"x {i}", f"y {i}"], ranking=[1, 2])
    write_rows(tmp_path / "rows.jsonl", rows)
    reading = reading_of(tmp_path / "rows.jsonl", DataConfig())
    assert "--set data.columns.ranks=ranking" in str(reading.as_json(tmp_path / "rows.jsonl")["hint"])


@pytest.mark.parametrize("name", ["split", "subset", "part"])
@pytest.mark.parametrize("other", ["test", "validation", "DEV", "test_prefs", "held-out"])
def test_a_column_that_divides_the_rows_is_told(tmp_path: Path, name: str, other: str) -> None:
    rows = rows_of({"chosen": "yes", "rejected": "no"}, **{name: lambda i: other if i < 4 else "train"})
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    hint = str(reading_of(path, DataConfig()).as_json(path)["hint"])
    assert f"`{name}` says {other.lower()} in 4 rows of the first 12" in hint and "data.decontaminate" in hint
    write_rows(path, [row | {name: "train"} for row in rows])
    assert reading_of(path, DataConfig()).as_json(path)["hint"] is None
