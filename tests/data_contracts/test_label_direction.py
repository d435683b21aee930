"""A label that is turned round between the file and the published pair is named; data in which nothing says it are not
judged."""

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.base.errors import CheckFailed
from data_contracts import published_splits

ROWS = [
    {"prompt": f"Question {i}?", "chosen": f"Right answer {i}.", "rejected": f"Wrong reply {i}."} for i in range(200)
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write rows in the format of the file's suffix."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def direction(out: Path) -> tuple[str, str]:
    rows = json.loads((out / "attachments" / "self_checks.json").read_text())
    return next((row["verdict"], row["numbers"]) for row in rows if row["name"] == "validate.direction")


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish every pair of row 5 with its responses exchanged."""
    row_of = published_splits._row

    def exchanged(rows: Any, index: int, item: Any) -> Any:
        row = row_of(rows, index, item)
        if rows.kind == "pairs" and row["row"] == 5:
            row = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
        return row

    monkeypatch.setattr(published_splits, "_row", exchanged)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_the_rows_of_a_file_are_found_again_by_their_number(tmp_path, validate, suffix):
    validate(tmp_path / "out", {"preferences": written(tmp_path / f"pairs.{suffix}", ROWS)})
    assert direction(tmp_path / "out") == ("held", "chosen and rejected are exchanged in 0 of 64 pairs")


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet", None])
def test_a_turned_label_is_named_with_its_row(tmp_path, validate, turned, suffix):
    files = {} if suffix is None else {"preferences": written(tmp_path / f"pairs.{suffix}", ROWS)}
    with pytest.raises(CheckFailed, match=r"validate\.direction failed.* in 1 of \d+ pairs, row 5 of preferences"):
        validate(tmp_path / "out", files, generator={"demonstrations": 50, "pairs": 120})


def test_a_turned_label_is_named_in_transcripts_in_messages_and_under_other_names(tmp_path, validate, turned):
    def both(texts: Any) -> list[dict[str, Any]]:
        return [{side: texts(row["prompt"], row[side]) for side in ("chosen", "rejected")} for row in ROWS]

    transcripts = both(lambda prompt, text: f"\n\nHuman: {prompt}\n\nAssistant: {text}")
    roles = ("user", "assistant")
    messages = both(lambda *texts: [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)])
    named = [{"prompt": row["prompt"], "rejected": row["chosen"], "worse": row["rejected"]} for row in ROWS]
    columns = {"chosen": "rejected", "rejected": "worse"}
    for rows, options in ((transcripts, {}), (messages, {}), (named, {"columns": columns})):
        with pytest.raises(CheckFailed, match=r"exchanged in 1 of 64 pairs, row 5"):
            validate(tmp_path / "out", {"preferences": written(tmp_path / "pairs.jsonl", rows)}, **options)


def test_two_files_that_contradict_each_other_row_by_row_turn_nothing(tmp_path, validate):
    other = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in ROWS[:40]]
    files = {
        "preferences/ann.jsonl": written(tmp_path / "ann.jsonl", ROWS),
        "preferences/bob.jsonl": written(tmp_path / "bob.jsonl", other),
    }
    validate(tmp_path / "out", files, checks={"consistent": {"severity": "warn"}})
    assert direction(tmp_path / "out") == ("held", "chosen and rejected are exchanged in 0 of 104 pairs")


def test_pairs_that_votes_decide_are_not_judged(tmp_path, validate):
    rows = [
        {"prompt": row["prompt"], "a": row["rejected"], "b": row["chosen"], "votes": {"a": 1, "b": 2}} for row in ROWS
    ]
    validate(tmp_path / "out", {"preferences": written(tmp_path / "pairs.jsonl", rows)})
    assert direction(tmp_path / "out")[0] == "not judged"


def test_pairs_of_an_older_file_that_new_votes_turn_are_not_judged(tmp_path, validate):
    rows = [row | {"votes": {"a": 0, "b": 3}} for row in ROWS]
    columns = {"a": "chosen", "b": "rejected"}
    validate(tmp_path / "out", {"preferences": written(tmp_path / "pairs.jsonl", rows)}, columns=columns)
    assert direction(tmp_path / "out")[0] == "not judged"
