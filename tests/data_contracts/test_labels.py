"""Rankings, single questions, competence of annotators, prompts of PPO's own: what reaches the artifact."""

import functools
import json
from collections import defaultdict

import pytest

from components.base.errors import UserError
from components.data.formats.pairs import parse_pairs
from components.data.rows import RawRow
from components.data.tables.published import read_split
from data_contracts.findings import whole


def ranking(**data):
    return parse_pairs(RawRow(3, {"prompt": "q", **data}), "ranking", "preferences", 1000)


def test_a_rankings_pairs_are_all_that_differ_in_rank_and_count_once_together():
    rows = ranking(responses=["best", "middle", "worst"])
    assert [(r.item["chosen"], r.item["rejected"]) for r in rows] == [
        ("best", "middle"), ("best", "worst"), ("middle", "worst"),
    ]  # fmt: skip
    assert sum(r.item["weight"] for r in rows) == pytest.approx(1) and {r.number for r in rows} == {3}
    tied = ranking(responses=["a", "b", "c"], ranks=[2, 1, 2])
    assert [(r.item["chosen"], r.item["rejected"], r.item["weight"]) for r in tied] == [
        ("b", "a", 0.5),
        ("b", "c", 0.5),
    ]


def test_the_pairs_that_a_ranking_keeps_count_once_together(tmp_path, validate):
    """Of rows 1 to 60 the last two responses are equal: of three pairs one says nothing, and one stands there twice."""
    path, rows = tmp_path / "rankings.jsonl", []
    for i in range(90):
        responses = [f"{side} of {i} {'x' * (i % 7)}" for side in ("best", "middle", "worst")]
        rows.append({"prompt": f"question {i}", "responses": responses[:2] + responses[1 if i < 60 else 2 :][:1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    validate(tmp_path / "out", {"preferences": path})
    splits = (tmp_path / "out" / "artifact").glob("pairs.*")
    pairs = [row for split in splits for row in read_split(split)]
    weights = defaultdict(list)
    for pair in pairs:
        weights[pair["row"]].append(pair["weight"])
    assert len(weights) == 90 and {row: sum(found) for row, found in weights.items()} == pytest.approx(
        dict.fromkeys(weights, 1)
    )
    assert [len(weights[row]) for row in (1, 60, 61, 90)] == [1, 1, 3, 3]


@pytest.mark.parametrize(
    ("data", "check"),
    [
        ({"responses": ["a"]}, "fields_present"),
        ({"responses": ["a", "b"], "ranks": [1]}, "fields_present"),
        ({"responses": ["a", "b"], "ranks": [1, "x"]}, "fields_present"),
        ({"responses": ["a", "b"], "ranks": [1, 1]}, "decided"),
        ({"responses": ["a", 5]}, "fields_present"),
    ],
)
def test_a_broken_ranking_is_one_bad_row(data, check):
    (row,) = ranking(**data)
    assert [p.check for p in row.problems] == [check]


def test_votes_on_single_questions_become_shares_and_too_many_are_refused():
    pair = {"prompt": "q", "chosen": "x", "rejected": "y", "votes_chosen": 3, "votes": 4, "votes_kind": 1}
    (row,) = parse_pairs(RawRow(1, pair), "strings", "preferences", 1000)
    assert row.item["objectives"] == {"kind": 0.25} and row.item["soft_label"] == 0.75
    (bad,) = parse_pairs(RawRow(1, pair | {"votes_kind": 5}), "strings", "preferences", 1000)
    assert [p.check for p in bad.problems] == ["votes_valid"]


def voted(n=80):
    """Three annotators name the worse response always; two name the better one in a quarter of the rows, else four."""
    rows = []
    for i in range(n):
        first_good = i % 2 == 0
        right, wrong = ("a", "b") if first_good else ("b", "a")
        sides = {"a": f"good {i}", "b": f"bad {i}"} if first_good else {"a": f"bad {i}", "b": f"good {i}"}
        careful = ["c1", "c2", "c3", "c4"][: 2 if i % 8 < 2 else 4]
        votes = [{"annotator": who, "label": right} for who in careful]
        votes += [{"annotator": who, "label": wrong} for who in ("w1", "w2", "w3")]
        rows.append({"prompt": f"question {i}", **sides, "votes": votes})
    return rows


def pairs_of(out):
    names = ("train", "calibration", "test")
    return [row for name in names for row in read_split(out / "artifact" / f"pairs.{name}")]


def test_competence_outweighs_a_majority_of_annotators_who_are_often_wrong(tmp_path, validate):
    source = tmp_path / "votes.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in voted()))
    validate(tmp_path / "majority", {"preferences": source})
    right = [row["chosen"].startswith("good") for row in pairs_of(tmp_path / "majority")]
    assert sum(right) / len(right) == 0.75
    validate(tmp_path / "weighed", {"preferences": source}, labels="dawid_skene")
    weighed = pairs_of(tmp_path / "weighed")
    assert len(weighed) == 80 and all(row["chosen"].startswith("good") for row in weighed)
    assert all(0.5 <= row["soft_label"] <= 1 and row["votes_chosen"] in (2, 4) for row in weighed)


def test_competence_that_has_not_converged_is_said(tmp_path, validate, monkeypatch, caplog):
    source = tmp_path / "votes.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in voted()))
    validate(tmp_path / "whole", {"preferences": source}, labels="dawid_skene")
    assert "converged" not in caplog.text
    monkeypatch.setattr(whole, "dawid_skene", functools.partial(whole.dawid_skene, max_iterations=1))
    validate(tmp_path / "short", {"preferences": source}, labels="dawid_skene")
    assert "votes.jsonl: Dawid and Skene's model has not converged" in caplog.text


def test_competence_without_annotators_is_refused(tmp_path, validate):
    source = tmp_path / "votes.jsonl"
    source.write_text("".join(json.dumps(row | {"votes": ["a", "a"]}) + "\n" for row in voted()))
    with pytest.raises(UserError, match=r"no row of .* says who voted"):
        validate(tmp_path / "out", {"preferences": source}, labels="dawid_skene")


def test_prompts_of_ppos_own_take_the_place_of_the_pairs(tmp_path, validate):
    source, asked = tmp_path / "pairs.jsonl", tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in voted()))
    asked.write_text("".join(json.dumps({"prompt": f"other {i % 50}"}) + "\n" for i in range(60)))
    metrics = validate(tmp_path / "out", {"preferences": source, "prompts": asked})
    assert sum(metrics[f"data/prompts_{name}"] for name in ("train", "calibration", "test")) == 50
    said = str(list(read_split(tmp_path / "out/artifact/prompts.train")))
    assert "other" in said and "question" not in said
