"""Votes of models are counted apart from those of people, and data without them are as they were."""

from pathlib import Path
from typing import Any

import pytest

from components.base.jsonl import write_rows
from components.data.tables.published import read_split

ONE, OTHER = ({"annotator": "model:org/big:1", "label": "b"}, {"annotator": "model:small", "label": "b"})
VOTES: list[list[Any]] = [[{"annotator": "ann", "label": "b"}, "b", ONE], [ONE], ["b", {"label": "b"}, OTHER, ONE]]


def test_a_models_votes_are_counted_and_stand_in_the_pairs(validate: Any, tmp_path: Path) -> None:
    """Rows take turns with 1 vote of models of 3, 1 of 1, and 2 of 4; names may be missing beside them."""
    told = [
        {"prompt": f"Question {i}?", "a": f"answer {i}", "b": f"better, {i}", "votes": VOTES[i % 3]} for i in range(60)
    ]
    people = [row | {"votes": row["votes"][:-1] or ["b"]} for row in told if row["votes"] is not VOTES[2]]
    found, kept = {}, {}
    for name, rows in (("mixed", told), ("people", people)):
        write_rows(tmp_path / f"{name}.jsonl", rows)
        found[name] = validate(tmp_path / name, {"preferences": tmp_path / f"{name}.jsonl"})
        splits = (tmp_path / name / "artifact").glob("pairs.*")
        kept[name] = [row for split in splits for row in read_split(split)]
    assert {(row["votes"], row["votes_of_models"]) for row in kept["mixed"]} == {(3, 1), (1, 1), (4, 2)}
    metrics, n = found["mixed"], len(kept["mixed"])
    of_models = sum(row["votes_of_models"] for row in kept["mixed"]) / sum(row["votes"] for row in kept["mixed"])
    assert n == 60 and of_models == 80 / 160
    assert metrics["data/model_votes"] == pytest.approx(0.5) and metrics["data/model_pairs"] == pytest.approx(1 / 3)
    assert metrics["data/model_votes_from/org/big_1"] == pytest.approx(0.5 * 60 / 80)
    assert metrics["data/model_votes_from/small"] == pytest.approx(0.5 * 20 / 80)
    assert not [name for name in found["people"] if "model" in name]
    assert not [row for row in kept["people"] if "votes_of_models" in row]


def test_a_model_is_known_by_its_name_where_a_row_is_a_vote(validate: Any, tmp_path: Path) -> None:
    rows = [
        {"prompt": f"Question {i}?", "a": f"answer {i}", "b": f"better, {i}", "annotator": who, "label": "b"}
        for i in range(40)
        for who in ("ann", "model:big")
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert validate(tmp_path / "out", {"preferences": tmp_path / "rows.jsonl"})["data/model_votes"] == 0.5
