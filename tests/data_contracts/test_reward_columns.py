"""`data.reward_columns`: columns of the prompts that reach PPO's sources of reward."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.config import DataConfig
from components.data.tables.published import read_split
from data_contracts.rows.gather import RowSource, _plain, judged_rows, look_at


def test_columns_of_what_the_prompts_come_from_stand_beside_each_prompt(validate: Any, tmp_path: Path) -> None:
    numbers = [(a, b) for a in range(12) for b in range(10)]
    pairs = [
        {"prompt": f"What is {a} and {b}?", "chosen": f"It is {a + b} in all.", "rejected": f"It may be {a * 7} or so.",
         "answer": a + b if a < 11 else 2**70 + b, "other": "x"}
        for a, b in numbers
    ]  # fmt: skip
    write_rows(tmp_path / "pairs.jsonl", pairs)
    inputs = {"preferences": tmp_path / "pairs.jsonl"}
    validate(tmp_path / "own", inputs, reward_columns=("answer",))
    rows = [row for split in ("train", "calibration", "test") for row in
            read_split(tmp_path / "own" / "artifact" / f"prompts.{split}")]  # fmt: skip
    asked = {row["prompt"][0]["content"]: row["columns"] for row in rows}
    assert len(rows) > 100 and asked["What is 3 and 4?"] == {"answer": 7}
    assert asked["What is 11 and 9?"] == {"answer": 2**70 + 9}, "no other number, though orjson cannot write it"
    assert all(row["columns"].keys() == {"answer"} for row in rows)

    prompts = tmp_path / "prompts.jsonl"
    write_rows(prompts, [{"prompt": f"Name {a}, {b}.", "answer": [a, b]} for a, b in numbers])
    data = DataConfig(reward_columns=("answer",), prompts=str(prompts))
    for name, path, kept in (("prompts", prompts, True), ("preferences", tmp_path / "pairs.jsonl", False)):
        items = [row.item for row in judged_rows(RowSource.named(name, path, data), 1000)]
        assert all(item is not None and ("columns" in item) is kept for item in items), "pairs are no prompts then"


def test_a_column_that_no_row_has_is_refused_and_what_json_does_not_know_is_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "What?", "answer": 1}) + "\n")
    with pytest.raises(UserError, match=r"names the column 'right', which .*: its columns are prompt, answer"):
        look_at("prompts", path, DataConfig(reward_columns=("right",), prompts=str(path)))
    assert [_plain(value) for value in (date(2026, 1, 2), float("nan"), {"a": [1]})] == [
        "2026-01-02",
        "nan",
        {"a": [1]},
    ]
