"""A split comes back row for row, in the same bytes whoever writes it, and is read without being held in memory."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.base.errors import UserError
from components.base.jsonl import write_rows
from components.data.tables import published
from components.data.tables.published import SplitRows, SplitWriter, has_split, read_split
from tests.splits import write_split

OPTIONAL: dict[str, Any] = {
    "category": None, "margin": None, "objectives": None, "soft_label": None, "votes": None, "votes_chosen": None,
}  # fmt: skip
"""What a pair holds as None where nothing is known of it."""


def pair(number: int, **more: Any) -> dict[str, Any]:
    prompt = [{"content": f"Frage {number}: größer \N{GRINNING FACE}?", "role": "user"}]
    row = {"prompt": prompt, "chosen": f"ja {number}", "rejected": "いいえ", "source": "a.jsonl", "row": number + 1}
    return OPTIONAL | row | more


VARIED = [
    pair(0),
    pair(1, columns={"answer": [1, "1", None, {"z": 2**70}], "empty": ""}, weight=0.5),
    pair(2, columns={"answer": "1"}, overlong=True, votes=5, votes_chosen=4, soft_label=0.8, margin=1e-9),
    pair(3, columns={}, objectives={"helpful": 1.0, "compliant": 0.5}, judged_in="batch 1", category="spät\u2028er"),
    pair(4, columns={"answer": 1.5}, objectives={}, chosen="tab\tand\nline"),
]  # fmt: skip


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_rows_come_back_with_the_fields_that_they_had_and_values_of_the_same_types(tmp_path: Path) -> None:
    write_split(tmp_path / "pairs.train", VARIED)
    found = list(read_split(tmp_path / "pairs.train"))
    assert found == VARIED
    assert [repr(row.get("columns")) for row in found] == [repr(row.get("columns")) for row in VARIED]
    assert all(list(row) == sorted(row) for row in found), "as rows of JSON Lines had them"
    assert all(list(message) == ["content", "role"] for row in found for message in row["prompt"]), (
        "str(prompt) is a name"
    )


def test_a_split_without_rows_is_there_and_has_its_columns(tmp_path: Path) -> None:
    write_split(tmp_path / "prompts.test", [])
    rows = read_split(tmp_path / "prompts.test")
    assert len(rows) == 0 and list(rows) == [] and not rows and list(rows[:5]) == []
    (shard,) = (tmp_path / "prompts.test").iterdir()
    assert datasets.Dataset.from_file(str(shard)).column_names == ["category", "columns", "prompt"]


@pytest.fixture
def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "BATCH", 3)
    monkeypatch.setattr(published, "SHARD", 10)


def test_rows_are_found_by_index_slice_and_choice_across_batches_and_shards(tmp_path: Path, cut_small: None) -> None:
    rows = [pair(number) for number in range(25)]
    write_split(tmp_path / "pairs.train", rows)
    assert sorted(digests(tmp_path / "pairs.train")) == ["00000.arrow", "00001.arrow", "00002.arrow"]
    found = read_split(tmp_path / "pairs.train")
    assert isinstance(found, SplitRows) and len(found) == 25 and list(found) == rows
    assert [found[i] for i in (0, 9, 10, 24, -1, -25)] == [rows[i] for i in (0, 9, 10, 24, -1, -25)]
    for part in (slice(8, 12), slice(None, 4), slice(3, None, 7), slice(-2, None), slice(30, None), slice(None, None)):
        assert list(found[part]) == rows[part] and len(found[part]) == len(rows[part])
    assert list(found[5:20][2:4]) == rows[7:9]
    chosen = found.choose(np.array([24, 3, 3, 11]))
    assert list(chosen) == [rows[24], rows[3], rows[3], rows[11]] and chosen[1] == rows[3]
    assert list(found[10:].choose(np.array([0, 14]))) == [rows[10], rows[24]]
    for outside in (25, -26):
        with pytest.raises(IndexError):
            found[outside]


def test_shards_are_cut_by_rows_and_batches_by_characters_too(
    tmp_path: Path, cut_small: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(published, "BATCH_CHARACTERS", 100)
    write_split(tmp_path / "pairs.train", [pair(i, chosen="x" * (200 if i == 1 else 1)) for i in range(12)])
    with pa.memory_map(str(tmp_path / "pairs.train" / "00000.arrow")) as file:
        sizes = [batch.num_rows for batch in pa.ipc.open_stream(file)]
    assert sum(sizes) == 10 and sizes[0] == 2, "the row that reaches 100 characters ends its batch"


def test_another_process_with_another_hash_seed_writes_the_same_bytes(tmp_path: Path) -> None:
    write_split(tmp_path / "here" / "pairs.train", VARIED)
    (tmp_path / "rows.py").write_text(f"VARIED = {VARIED!r}")
    code = "from rows import VARIED; from pathlib import Path; from tests.splits import write_split"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; write_split(Path('there/pairs.train'), VARIED)"],
        cwd=tmp_path, env={"PYTHONHASHSEED": "5", "PYTHONPATH": f"{Path.cwd()}:{tmp_path}"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    assert digests(tmp_path / "here" / "pairs.train") == digests(tmp_path / "there" / "pairs.train")


def test_a_split_left_half_written_is_written_anew_from_its_first_shard(tmp_path: Path, cut_small: None) -> None:
    write_split(tmp_path / "whole" / "pairs.train", map(pair, range(25)))
    with pytest.raises(KeyboardInterrupt), SplitWriter(tmp_path / "pairs.train") as split:  # as a signal would
        for number in range(14):
            split.write(pair(number))
        raise KeyboardInterrupt
    assert digests(tmp_path / "pairs.train") != digests(tmp_path / "whole" / "pairs.train")
    with pytest.raises(FileExistsError):
        SplitWriter(tmp_path / "pairs.train")
    write_split(tmp_path / "pairs.train", map(pair, range(25)))
    assert digests(tmp_path / "pairs.train") == digests(tmp_path / "whole" / "pairs.train")


def test_an_artifact_of_an_earlier_version_is_read_as_it_is(tmp_path: Path) -> None:
    write_rows(tmp_path / "pairs.train.jsonl", VARIED)
    assert read_split(tmp_path / "pairs.train") == VARIED and has_split(tmp_path / "pairs.train")
    assert not has_split(tmp_path / "pairs.test")
    with pytest.raises(FileNotFoundError, match=r"pairs\.test"):
        read_split(tmp_path / "pairs.test")


def test_what_no_column_holds_is_refused_with_row_and_field(tmp_path: Path) -> None:
    for row, said in (
        (pair(6, chosen="a\ud800b"), r"row 7 of 'a\.jsonl' has a character in chosen that UTF-8 cannot encode"),
        (pair(6, prompt=[{"role": "user", "content": "\udcff"}]), r"row 7 of 'a\.jsonl' has a character in prompt"),
        (pair(6, votes=2**63), r"row 7 of 'a\.jsonl' has a number in votes that does not fit in 64 bits"),
    ):
        with pytest.raises(UserError, match=said):
            write_split(tmp_path / "pairs.train", [pair(0), row])
    with pytest.raises(ValueError, match=r"pairs\.train has no column colour"):
        write_split(tmp_path / "pairs.train", [pair(0, colour="red")])
    write_split(tmp_path / "prompts.test", [{"prompt": [], "category": None, "columns": {"ref": "\ud800"}}])
    assert read_split(tmp_path / "prompts.test")[0]["columns"] == {"ref": "\ud800"}


texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
message = st.fixed_dictionaries({"content": texts, "role": st.sampled_from(["user", "assistant"])})
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5,
)  # fmt: skip
rows_of_any_kind = st.lists(
    st.fixed_dictionaries(
        {
            "prompt": st.lists(message, max_size=4),
            "category": st.none() | texts,
        },
        optional={"columns": st.dictionaries(texts, values, max_size=3)},
    ),
    max_size=9,
)  # fmt: skip


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows_of_any_kind)
def test_any_prompts_come_back_with_any_further_columns(tmp_path: Path, cut_small: None, rows: list[Any]) -> None:
    write_split(tmp_path / "prompts.train", rows)
    found = list(read_split(tmp_path / "prompts.train"))
    assert json.dumps(found, sort_keys=True) == json.dumps(rows, sort_keys=True), "1, 1.0, true and '1' differ in JSON"


def test_reading_a_split_holds_a_batch_and_not_the_split(tmp_path: Path) -> None:
    """Peak of Arrow's own memory: mapped bytes are not in it."""
    write_split(tmp_path / "pairs.train", (pair(i, chosen="word " * 200) for i in range(6_000)))
    before = pa.default_memory_pool().bytes_allocated()
    rows = read_split(tmp_path / "pairs.train")
    assert max(len(row["chosen"]) for row in rows) == len(rows[-1]["chosen"]) == 1000
    assert pa.default_memory_pool().bytes_allocated() - before < 100_000, "6 MB of text are mapped, not copied"
