"""The pairs of a judge are judged as preferences are, under names of their own."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.config import DataConfig
from components.data.splits import SPLITS
from components.data.tables.published import read_split
from data_contracts import judge_pairs
from data_contracts.config import ValidateJob, ValidateJudgeJob


def job_of(job: Callable[..., ValidateJob], **data: Any) -> ValidateJudgeJob:
    plain = job()
    return ValidateJudgeJob(seed=0, generation=plain.generation, data=DataConfig(**data), sft=plain.sft)  # type: ignore[arg-type]


def pairs(path: Path, **names: str) -> Path:
    """150 pairs with votes and a row that is none; `names` renames columns."""
    rows = [
        {"prompt": f"question {i} of today", names.get("a", "a"): f"first answer {i}", "b": f"answer {i} the second",
         "votes": ["a", "b", "a"] if i % 3 else ["b", "b", "a"]}
        for i in range(150)
    ]  # fmt: skip
    path.write_text("\n".join([*map(json.dumps, rows), "no json"]) + "\n")
    return path


def test_their_numbers_splits_and_quarantine_are_those_of_preferences(job: Any, validate: Any, tmp_path: Path) -> None:
    path = pairs(tmp_path / "careful.jsonl")
    plain = validate(tmp_path / "plain", {"preferences": path})
    observed: dict[str, float] = {}

    def observe(step: int, metrics: Any, total: Any = None, **_: Any) -> None:
        observed.update(metrics)

    found = judge_pairs.run(job_of(job), {"judge_preferences": path}, tmp_path / "judge", observe)
    assert found == {name.replace("data/", "data/judge_"): value for name, value in plain.items()}
    assert found["data/judge_pairs"] == 150 and found["data/judge_quarantined"] == 1
    assert observed and all(name.startswith("data/judge_") for name in observed)
    mine, its = tmp_path / "judge" / "artifact", tmp_path / "plain" / "artifact"
    for split in SPLITS:
        texts = [[(row["prompt"], row["chosen"]) for row in read_split(of / f"pairs.{split}")] for of in (mine, its)]
        assert texts[0] == texts[1] and texts[0]
    (row,) = read_rows(mine / "quarantine.jsonl")
    assert row["file"] == "judge_preferences" and row["row"] == 151
    assert {path.name for path in (tmp_path / "judge" / "attachments").iterdir()} == {"judge"}
    assert (tmp_path / "judge" / "attachments" / "judge" / "quarantine.jsonl").is_file()


def test_columns_are_renamed_by_their_own_option_which_errors_name(job: Any, tmp_path: Path) -> None:
    path = pairs(tmp_path / "careful.jsonl", a="one")
    inputs = {"judge_preferences": path}
    found = judge_pairs.run(job_of(job, judge_columns={"a": "one"}), inputs, tmp_path / "out", lambda *_, **__: None)
    assert found["data/judge_pairs"] == 150
    with pytest.raises(UserError, match=r"^data\.judge_preferences: data\.judge_columns names the column 'two'"):
        judge_pairs.run(job_of(job, judge_columns={"a": "two"}), inputs, tmp_path / "wrong", lambda *_, **__: None)


def test_without_a_file_the_built_in_tasks_careful_annotators_label_them(job: Any, tmp_path: Path) -> None:
    made = job_of(job, generator={"judge_pairs": 150, "pairs": 50, "demonstrations": 50})
    found = judge_pairs.run(made, {}, tmp_path / "out", lambda *_, **__: None)
    assert found["data/judge_pairs"] + found["data/judge_quarantined"] == 150 and found["data/judge_contract"] == 1
    assert json.loads((tmp_path / "out" / "artifact" / "task.json").read_text()) == {"name": "support-desk"}
    assert {row["source"] for row in read_split(tmp_path / "out" / "artifact" / "pairs.test")} == {"judge_preferences"}
