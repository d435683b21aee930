"""One bad row is a problem of that row, with its name; a file that would fill memory is refused with the bound."""

import csv
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.base.errors import UserError
from components.data import readers
from components.data.readers import read_source

GOOD = {"prompt": "p", "chosen": "x", "rejected": "y"}
DEEP = "[" * 5000 + "]" * 5000
TWICE = '{"prompt": "p", "prompt": "q", "chosen": "x", "rejected": "y"}'


def problems(path: Path) -> dict[int, str]:
    return {row.number: row.problem.text for row in read_source(path) if row.problem}


def wrong_utf8() -> pa.Array:
    return pa.Array.from_buffers(pa.utf8(), 2, pa.array([b"ok", b"\xff\xfe"]).buffers())


def write_parquet(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table({name: pa.array([text, text]) for name, text in GOOD.items()} | columns), path)
    return path


@pytest.mark.parametrize("nested", [DEEP, "[" * 300 + "]" * 300])
def test_a_row_nested_too_deep_is_one_bad_row_of_json_lines_of_an_array_and_of_csv(tmp_path: Path, nested: str) -> None:
    good, deep = json.dumps(GOOD), f'{{"prompt": "p", "more": {nested}}}'
    (tmp_path / "a.jsonl").write_text(f"{good}\n{deep}\n{good}\n")
    (tmp_path / "a.json").write_text(f"[{good}, {deep},\n {good}]")
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file).writerows([["prompt", "more"], ["p", ""], ["q", '[{"a":' + nested + "}]"], ["r", ""]])
    for name, number in (("a.jsonl", 2), ("a.json", 2), ("a.csv", 3)):
        found = problems(tmp_path / name)
        assert found.keys() == {number} and "nested more than 100 deep" in found[number], name
    assert "column `more`" in problems(tmp_path / "a.csv")[3]


def test_a_key_that_stands_twice_is_named_and_only_its_row_is_bad(tmp_path: Path) -> None:
    good = json.dumps(GOOD)
    (tmp_path / "a.jsonl").write_text(f"{good}\n{TWICE}\n{good}\n")
    (tmp_path / "a.json").write_text(f"[{good}, {TWICE}, {good}]")
    (tmp_path / "lines.json").write_text(f"{TWICE}\n{good}\n")
    for name, number in (("a.jsonl", 2), ("a.json", 2), ("lines.json", 1)):
        found = problems(tmp_path / name)
        assert found.keys() == {number} and "a key appears twice: 'prompt'" in found[number], name
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file).writerows([["prompt", "votes"], ["p", '{"a": 1, "a": 2}']])
    assert "column `votes`: a key appears twice: 'a'" in problems(tmp_path / "a.csv")[2]


def test_an_array_that_breaks_off_behind_a_bad_row_loses_nothing_silently(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'[{TWICE}, {{"prompt": "p", "cho')
    assert problems(tmp_path / "a.json").keys() == {1, 2}


def test_a_column_that_stands_twice_in_parquet_is_named_inside_of_another_too(tmp_path: Path) -> None:
    columns = [pa.array(["p"])] * 3
    pq.write_table(pa.Table.from_arrays(columns, names=["prompt", "chosen", "prompt"]), tmp_path / "a.parquet")
    inner = pa.StructArray.from_arrays([pa.array(["p"])] * 2, names=["role", "role"])
    pq.write_table(pa.table({"prompt": inner}), tmp_path / "b.parquet")
    for name, column in (("a.parquet", "prompt"), ("b.parquet", "role")):
        with pytest.raises(UserError, match=f"{name} has a column twice: '{column}'"):
            list(read_source(tmp_path / name))


def test_text_that_is_no_utf8_is_a_problem_of_its_cell_in_parquet(tmp_path: Path) -> None:
    rows = list(read_source(write_parquet(tmp_path / "a.parquet", chosen=wrong_utf8())))
    assert [row.data["chosen"] for row in rows] == ["ok", "\udcff\udcfe"], "as in CSV: a row check refuses it"
    inner = pa.StructArray.from_arrays([wrong_utf8()], ["note"])
    rows = list(read_source(write_parquet(tmp_path / "b.parquet", more=pa.ListArray.from_arrays([0, 1, 2], inner))))
    assert [row.data["more"] for row in rows] == [[{"note": "ok"}], [{"note": "\udcff\udcfe"}]]
    assert not any(row.problem for row in rows)


@pytest.mark.parametrize(
    "column",
    [
        pa.array([0, 2**62], pa.timestamp("us")),
        pa.array([0, 2**30], pa.date32()),
        pa.array([0, 1], pa.timestamp("ms", "Mars/Phobos")),
        pa.array([0, 2**62], pa.duration("s")),
    ],
    ids=lambda column: str(column.type),
)
def test_a_date_beyond_the_year_9999_or_of_an_unknown_zone_kills_no_run(tmp_path: Path, column: pa.Array) -> None:
    rows = list(read_source(write_parquet(tmp_path / "a.parquet", noted=column)))
    assert [row.data["chosen"] for row in rows] == ["x", "x"] and not any(row.problem for row in rows)
    assert str(rows[1].data["noted"]).endswith("that can't be read")


def test_a_folder_saved_by_datasets_is_read_as_tolerantly(tmp_path: Path) -> None:
    import datasets

    table = pa.table({"prompt": ["p", "q"], "chosen": wrong_utf8(), "noted": pa.array([0, 2**62], pa.timestamp("us"))})
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    rows = list(read_source(tmp_path / "saved"))
    assert [(row.number, row.data["chosen"]) for row in rows] == [(1, "ok"), (2, "\udcff\udcfe")]
    (tmp_path / "saved" / "state.json").write_text("[1]")
    with pytest.raises(UserError, match="saved"):
        list(read_source(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a"])
@pytest.mark.parametrize("line", [b'{"prompt": "p"}\n', b"\0", b"\n"], ids=["rows", "zeros", "blanks"])
@pytest.mark.parametrize("after", [b"", gzip.compress(b"\n")], ids=["", "says a small size"])
def test_a_gzip_bomb_is_refused_with_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, line: bytes, after: bytes
) -> None:
    monkeypatch.setattr(readers, "_UNPACKED", 2**20)
    (tmp_path / name).write_bytes(gzip.compress(line * (2**22 // len(line))) + after)
    with pytest.raises(UserError, match=rf"{name} (unpacks to more than 1 MiB, over 100 times|is not in a format)"):
        list(read_source(tmp_path / name))


def test_a_parquet_bomb_and_a_line_without_end_are_refused_with_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_UNPACKED", 2**20)
    monkeypatch.setattr(readers, "_LARGEST_LINE", 2**20)
    pq.write_table(pa.table({"prompt": ["\0" * 2**23]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"a\.parquet unpacks to more than 1 MiB"):
        list(read_source(tmp_path / "a.parquet"))
    for name in ("a.jsonl", "a.csv"):
        (tmp_path / name).write_bytes(b"x" * 2**21)
        with pytest.raises(UserError, match=rf"{name}, line 1: it is longer than 1 MiB"):
            list(read_source(tmp_path / name))


def test_a_text_that_parquet_stores_once_for_many_rows_fills_no_memory(tmp_path: Path) -> None:
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), pa.array(["x" * 2**22]))
    pq.write_table(pa.table({"prompt": shared}), tmp_path / "a.parquet", store_schema=False)
    rows = read_source(tmp_path / "a.parquet")
    assert [len(str(row.data["prompt"])) for row in rows] == [2**22] * 500
    assert pa.default_memory_pool().max_memory() < 2**29, "2 GiB in all"


def test_a_row_of_parquet_larger_than_the_bound_is_one_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("components.data.tables.cells.LARGEST_ROW", 2**20)
    table = pa.table({"prompt": [str(n) * (2**20 if n == 1 else 9) for n in range(4)]})
    pq.write_table(table, tmp_path / "a.parquet", compression="none")
    assert problems(tmp_path / "a.parquet") == {2: "the row is larger than 1 MiB"}
