"""Preferences in several files: judged as one, and each row named by its own file."""

import hashlib
import json

import numpy as np
import pytest

from components.base.errors import UserError
from components.base.jsonl import json_line
from components.reward.evaluation.slices import ScoredPairs, slices_of
from data_contracts.examine import examine
from data_contracts.published_splits import write_splits
from data_contracts.validate import source_counts, write_quarantine
from tests.splits import contents, lines, pairs, write

SPLITS = ("train", "calibration", "test")


@pytest.fixture
def split(job, tmp_path):
    """Write what later stages read of some files into a folder, without the contract's pages; returns the counts."""

    def split(given, out=tmp_path / "out", **data):
        asked = job(**data)
        found = examine(asked, given, tmp_path / "scratch", lambda *read: None)
        write_splits(found, out / "artifact")
        write_quarantine(found, out / "artifact")
        return source_counts(found)

    return split


@pytest.fixture(scope="module")
def judged(tmp_path_factory, validate):
    """Two files of two formats, with faults of each kind in the second: (folder, metrics)."""
    folder = tmp_path_factory.mktemp("several")
    twice, turned = pairs(3, 4)[0], {"prompt": "question 4", "chosen": "bad 4", "rejected": "good 4 indeed"}
    first = write(folder / "a.jsonl", pairs(0, 60))
    as_votes = [{"prompt": r["prompt"], "a": r["chosen"], "b": r["rejected"], "label": "a"} for r in pairs(60, 80)]
    no_side = {"prompt": "q", "a": "x", "label": "a"}
    as_votes += [no_side, {"prompt": twice["prompt"], "a": twice["rejected"], "b": twice["chosen"], "label": "b"}]
    as_votes += [{"prompt": turned["prompt"], "a": turned["chosen"], "b": turned["rejected"], "label": "a"}]
    as_votes += [{"prompt": "question 5", "a": "another answer", "b": "and one more", "label": "b"}]
    second = write(folder / "b.jsonl.gz", as_votes)
    metrics = validate(folder / "out", {"preferences/a.jsonl": first, "preferences/b.jsonl.gz": second})
    return folder / "out", metrics


def test_what_stands_in_two_files_is_found_and_named_by_file_and_row(judged):
    reasons = {(row["file"], row["row"]): row["reasons"] for row in lines(judged[0], "quarantine")}
    assert reasons == {
        ("a.jsonl", 5): ["contradicts row 23 of b.jsonl.gz"],
        ("b.jsonl.gz", 21): ["`b` is missing, expected text"],
        ("b.jsonl.gz", 22): ["duplicate of row 4 of a.jsonl"],
        ("b.jsonl.gz", 23): ["contradicts row 5 of a.jsonl"],
    }
    report = {check["name"]: check for check in json.loads(contents(judged[0])["report.json"])}
    consistent = report["consistent"]
    assert (consistent["rows"], consistent["row_numbers"]) == (2, [])
    assert consistent["rows_by_file"] == {"a.jsonl": [5], "b.jsonl.gz": [23]}
    page = (judged[0] / "attachments/data_docs/index.html").read_text()
    assert "a.jsonl: 5; b.jsonl.gz: 23" in page


def test_a_prompt_of_two_files_is_in_one_split_and_its_rows_keep_their_files(judged):
    places = {s: [(row["source"], row["row"]) for row in lines(judged[0], f"pairs.{s}")
                  if row["prompt"][0]["content"] == "question 5"] for s in SPLITS}  # fmt: skip
    assert sorted(map(sorted, filter(None, places.values()))) == [[("a.jsonl", 6), ("b.jsonl.gz", 24)]]
    assert judged[1]["data/leaked_prompts"] == 0


def test_the_rows_and_pairs_of_each_file_are_counted(judged):
    out, metrics = judged
    first, second = json.loads(contents(out)["sources.json"])
    assert (first["source"], first["rows"], first["quarantined"], first["pairs"]) == ("a.jsonl", 60, 1, 59)
    assert (second["source"], second["rows"], second["quarantined"], second["pairs"]) == ("b.jsonl.gz", 24, 3, 21)
    for split in SPLITS:
        found = [row["source"] for row in lines(out, f"pairs.{split}")]
        assert [found.count(each["source"]) for each in (first, second)] == [
            first["splits"][split],
            second["splits"][split],
        ]
    assert {name: metrics[f"data/pairs_from/{name}"] for name in ("a.jsonl", "b.jsonl.gz")} == {
        "a.jsonl": 59,
        "b.jsonl.gz": 21,
    }
    assert metrics["data/pairs"] == 80 and metrics["data/quarantined"] == 4


def test_the_first_rows_of_a_split_are_of_all_files_in_their_shares(tmp_path, split):
    """Stages take so many first rows: of one file after the other they would see the first alone."""
    given = {
        f"preferences/{name}": write(tmp_path / name, pairs(*of)) for name, of in (("a", (0, 300)), ("b", (300, 400)))
    }
    split(given)
    for name in ("pairs.train", "demonstrations.train", "pairs.test"):
        found = [row["source"] for row in lines(tmp_path / "out", name)]
        assert found.count("b") > 10
        assert abs(found[: len(found) // 2].count("b") - found.count("b") / 2) < 6
        within = [row["row"] for row in lines(tmp_path / "out", name) if row["source"] == "a"]
        assert within == sorted(within), "each file's own order is kept"


def test_the_order_in_which_files_are_given_changes_no_byte(tmp_path, split):
    given = {
        f"preferences/{name}": write(tmp_path / name, pairs(*of)) for name, of in (("a", (0, 40)), ("b", (20, 70)))
    }
    split(given, tmp_path / "one", max_pairs=30)
    split(dict(reversed(given.items())), tmp_path / "other", max_pairs=30)
    assert contents(tmp_path / "one") == contents(tmp_path / "other")


def test_each_file_is_a_slice_of_the_calibration_report_unless_its_rows_name_a_source(tmp_path, split):
    given = {"preferences/x/p.jsonl": write(tmp_path / "x/p.jsonl", pairs(0, 40)),
             "preferences/y/p.jsonl": write(tmp_path / "y/p.jsonl", pairs(40, 80)),
             "preferences/own": write(tmp_path / "own", pairs(80, 120, source="forum"))}  # fmt: skip
    split(given)
    rows = lines(tmp_path / "out", "pairs.train")
    names = {
        each.name
        for each in slices_of(ScoredPairs(rows, np.ones((2, len(rows)), int), np.ones((2, len(rows)))))
        if each.kind == "source"
    }
    assert names == {"x/p.jsonl", "y/p.jsonl", "forum"}


def test_a_file_without_one_valid_row_is_named_though_the_others_are_whole(tmp_path, split):
    given = {"preferences/good": write(tmp_path / "good", pairs(0, 60)),
             "preferences/bad": write(tmp_path / "bad", pairs(60, 62, chosen=""))}  # fmt: skip
    with pytest.raises(UserError, match=r"/bad has no valid preference pair in 2 rows.*the first is row 1 of bad"):
        split(given)


def test_votes_of_single_rows_are_gathered_within_each_file(tmp_path, split):
    rows = [{"prompt": f"q {i}", "a": f"yes {i} it is", "b": f"no {i}", "annotator": name, "label": "a"}
            for i in range(40) for name in ("ann", "bob")]  # fmt: skip
    given = {"preferences/v": write(tmp_path / "v", rows), "preferences/p": write(tmp_path / "p", pairs(0, 40))}
    counts = {each["source"]: (each["rows"], each["pairs"]) for each in split(given)}
    assert counts == {"p": (40, 40), "v": (80, 40)}


def test_rows_of_votes_in_the_second_file_count_beside_rows_of_the_first_with_their_numbers(tmp_path, job):
    votes = [{"prompt": "q 0", "a": "yes it is", "b": "no", "annotator": name, "label": "a"}
             for name in ("ann", "bob", "cy")]  # fmt: skip
    given = {"preferences/a": write(tmp_path / "a", pairs(0, 40)), "preferences/b": write(tmp_path / "b", votes)}
    assert examine(job(), given, tmp_path / "scratch", lambda *read: None).pairs.ledger.count() == 43


def test_one_file_gives_the_rows_that_it_gave_before_there_could_be_several(tmp_path, split):
    """Recorded at commit 4d8b2eb, of the splits as JSON Lines: the beginning of each file's sha256."""
    rows = [
        *pairs(0, 60),
        "not json",
        pairs(3, 4)[0],
        {"prompt": "question 5", "chosen": "bad 5", "rejected": "good 5 indeed"},
    ]
    assert split({"preferences": write(tmp_path / "p.jsonl", rows)}) == []
    splits = {
        name: b"".join(map(json_line, lines(tmp_path / "out", name))) for name in set(RECORDED) - {"quarantine.jsonl"}
    }
    found = {
        name: hashlib.sha256(data).hexdigest()[:16] for name, data in (contents(tmp_path / "out") | splits).items()
    }
    assert {name: found[name] for name in RECORDED} == RECORDED


RECORDED = {
    "pairs.train": "ed26f804dcbe65ea", "pairs.calibration": "fa4e6ed171f81f64",
    "pairs.test": "3639e827d43261d1", "prompts.train": "fc6043317c84c60e",
    "demonstrations.train": "21da3f1c46970b99", "quarantine.jsonl": "f0147a27876c630a",
}  # fmt: skip
