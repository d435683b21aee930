"""`data.sources`: how many pairs of a source are kept, and how much each counts in the reward model's loss."""

import math

import numpy as np
import pyarrow as pa
import pytest

from components.base.errors import UserError
from components.data.config import DataConfig, SplitConfig
from components.data.splits import prompt_key
from components.data.tables.published import read_split
from data_contracts.examine import examine
from data_contracts.findings.whole import selected_by_rank
from data_contracts.published_splits import weights_of_sources, write_splits
from data_contracts.rows import ledger
from data_contracts.rows.gather import RowSource, judged_rows
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import hash64, places
from data_contracts.validate import count_text, source_counts, write_quarantine
from tests.splits import pairs, write

SPLITS = ("train", "calibration", "test")


def publish(job, folder, given, **data):
    """Write what later stages read of some files (names to rows); returns the counts, all pairs, and every byte."""
    folder.mkdir()
    inputs = {f"preferences/{name}": write(folder / name, rows) for name, rows in given.items()}
    found = examine(job(**data), inputs, folder / "scratch", lambda *read: None)
    artifact = folder / "artifact"
    write_splits(found, artifact)
    write_quarantine(found, artifact)
    rows = {split: list(read_split(artifact / f"pairs.{split}")) for split in SPLITS}
    files = {str(f.relative_to(artifact)): f.read_bytes() for f in artifact.rglob("*") if f.is_file()}
    return source_counts(found), rows, files


A, B = pairs(0, 60, source="forum"), pairs(60, 100)
GIVEN = {
    "a": [*A, A[3], {"prompt": "no answer"}],
    "b": B,
    "c": [{"prompt": f"Rank {i}", "responses": [f"the best {i}", f"not bad {i}", "poor"], "ranks": [1, 2, 3]}
          for i in range(9)],
}  # fmt: skip
SOURCES = {"a": {"weight": 3, "max_pairs": 25}, "c": {"max_pairs": 20}}


@pytest.fixture(scope="module")
def plain(job, tmp_path_factory):
    return publish(job, tmp_path_factory.mktemp("sources") / "plain", GIVEN)


@pytest.fixture(scope="module")
def weighted(job, tmp_path_factory):
    return publish(job, tmp_path_factory.mktemp("sources") / "weighted", GIVEN, sources=SOURCES)


def lowest(rows, count, seed=0):
    """The numbers of the `count` rows that the seed puts first, by the formula."""

    def rank(row):
        key = prompt_key([{"role": "user", "content": row["prompt"]}])
        return hash64(f"{seed} {key} {row['chosen']} {row['rejected']}")

    return {number for number, _ in sorted(enumerate(rows, 1), key=lambda each: rank(each[1]))[:count]}


def test_a_cap_keeps_exactly_so_many_valid_pairs_of_its_source_and_they_are_counted(weighted):
    counts, rows, _ = weighted
    everything = [row for split in SPLITS for row in rows[split]]
    assert {row["row"] for row in everything if row["source"] == "forum"} == lowest(A, 25)
    assert {row["row"] for row in everything if row["source"] == "b"} == set(range(1, 41))
    a, b, c = counts
    assert (a["rows"], a["quarantined"], a["pairs"], a["left_out"], a["weight"]) == (62, 2, 25, 35, 3)
    assert count_text(a) == "25 of 62 rows, 35 valid pairs left out by max_pairs"
    assert (b["pairs"], b.keys()) == (40, {"source", "rows", "quarantined", "pairs", "splits"})
    assert (c["rows"], c["pairs"], c["left_out"], c["weight"]) == (9, 20, 7, 1)


def test_weights_are_published_with_a_mean_of_one_over_the_training_rows(weighted):
    """A ranking is one row, whatever the number of its kept pairs. A row's own `source` field names no file."""
    rows = weighted[1]
    n_a, n_b, n_c = (
        len({row["row"] for row in rows["train"] if row["source"] == name}) for name in ("forum", "b", "c")
    )
    assert n_a > 10 and n_c < sum(row["source"] == "c" for row in rows["train"])
    mean = (3 * n_a + n_b + n_c) / (n_a + n_b + n_c)
    for split in SPLITS:
        assert {(row["source"], row["source_weight"]) for row in rows[split]} <= {
            ("forum", 3 / mean), ("b", 1 / mean), ("c", 1 / mean)
        }  # fmt: skip
    total = math.fsum(row["weight"] * row["source_weight"] for row in rows["train"])
    assert total == pytest.approx(n_a + n_b + n_c, rel=1e-12)


def test_weights_and_caps_leave_the_other_rows_as_they_are_but_for_the_weights_column(plain, weighted):
    for split in SPLITS:
        whole = {(row["source"], row["row"], row["chosen"], row["rejected"]): row for row in plain[1][split]}
        for row in weighted[1][split]:
            before = whole[row["source"], row["row"], row["chosen"], row["rejected"]]
            same = {name: value for name, value in row.items() if name != "source_weight"}
            assert same | {"weight": 0} == before | {"weight": 0} and (row["source"] == "c" or row["weight"] == 1)
    assert plain[2]["quarantine.jsonl"] == weighted[2]["quarantine.jsonl"]
    schemas = [pa.ipc.open_stream(found[2]["pairs.train/00000.arrow"]).schema.names for found in (plain, weighted)]
    assert sorted([*schemas[0], "source_weight"]) == schemas[1], "data without weights have the bytes that they had"


def test_the_size_of_shards_and_the_order_of_sources_change_no_byte(job, tmp_path, weighted, monkeypatch):
    monkeypatch.setattr(ledger, "SHARD_ROWS", 7)
    given, sources = (dict(reversed(each.items())) for each in (GIVEN, SOURCES))
    assert publish(job, tmp_path / "other", given, sources=sources)[2] == weighted[2]


def chosen(tmp_path, given, most, limits):
    """The prompts that are kept of these files, by file."""
    table = Ledger(tmp_path, SplitConfig(), 0, ranked=True)
    sources = [RowSource.named("preferences", write(tmp_path / name, rows), DataConfig(), name)
               for name, rows in given.items()]  # fmt: skip
    table.fill((row for source in sources for row in judged_rows(source, 1000)), lambda seen: None)
    file, number = places(table.facts["row"][np.flatnonzero(selected_by_rank(table, most, limits))])
    return [{given[name][n - 1]["prompt"] for n in number[file == place]} for place, name in enumerate(given)]


def test_the_cap_of_a_source_comes_before_that_of_all_which_takes_each_source_in_its_share(tmp_path):
    """By rank alone, 18 of the 20 of `a` would be kept: they are those of low rank."""
    found = chosen(tmp_path, {"a": A, "b": B}, 30, {"a": 20})
    assert found == [{rows[n - 1]["prompt"] for n in lowest(rows, count)} for rows, count in ((A, 10), (B, 20))]
    by_rank = lowest([*(A[n - 1] for n in lowest(A, 20)), *B], 30)
    assert sum(n <= 20 for n in by_rank) == 18
    assert chosen(tmp_path, {"a": A, "b": B}, 30, {}) == [
        {[*A, *B][n - 1]["prompt"] for n in lowest([*A, *B], 30) if (n > 60) == of_b} for of_b in (False, True)
    ]
    assert chosen(tmp_path, {"a": A, "b": B}, None, {"a": 60}) == [{row["prompt"] for row in each} for each in (A, B)]


def test_the_order_of_a_sources_rows_decides_nothing(tmp_path):
    found = [chosen(tmp_path, {"a": rows, "b": B}, 40, {"a": 20}) for rows in (A, A[::-1])]
    assert found[0] == found[1] and sum(map(len, found[0])) == 40


@pytest.mark.parametrize(
    ("inputs", "named", "told"),
    [
        (("a", "b"), "c", r"names 'c', which is no source of data\.preferences: there are a, b\. Write.*\{a: \{weight"),
        (("a",), "a", r"names 'a'.*the only one is called preferences\. Write.*\{preferences: \{weight: 2\}\}"),
        ((), "a", r"names 'a'.*the only one is called preferences"),
    ],
)
def test_a_name_that_is_no_source_is_refused_with_those_that_are(job, tmp_path, inputs, named, told):
    given = {f"preferences/{name}" if len(inputs) > 1 else "preferences": write(tmp_path / name, pairs(0, 30))
             for name in inputs}  # fmt: skip
    with pytest.raises(UserError, match=told):
        examine(job(sources={named: {"weight": 2}}), given, tmp_path / "scratch", lambda *read: None)


def test_peoples_votes_of_earlier_rounds_count_as_sources_of_weight_one(job, tmp_path):
    """The file of preferences weighs less than them; its cap leaves them alone."""
    votes = tmp_path / "round"
    votes.mkdir()
    judged = [{"prompt": f"asked {i}", "a": f"yes {i} it is", "b": f"no {i}", "votes": ["a"] * 3, "judged_in": "0a"}
              for i in range(40)]  # fmt: skip
    write(votes / "preferences.jsonl", judged)
    write(votes / "judged.jsonl", [])
    given = {"preferences": write(tmp_path / "p", pairs(0, 60)), "votes/1": votes}
    asked = job(sources={"preferences": {"weight": 0.25, "max_pairs": 30}})
    found = examine(asked, given, tmp_path / "scratch", lambda *read: None)
    counts = {each["source"]: each["pairs"] for each in source_counts(found)}
    assert counts == {"preferences": 30, "votes-1": 40}
    weights = weights_of_sources(found)
    assert weights["votes-1"] / weights["preferences"] == pytest.approx(4, rel=1e-12)
