"""Vote tables of one row a vote: the same pairs as a table of one row a pair, whatever the order of rows and sides."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from components.data.rows import Ballot, RawRow, Row
from data_contracts.rows.gather import RowSource, judged_rows

ASKED = {"prompt": "Which?", "a": "tea", "b": "coffee"}


def judged(rows: list[dict[str, Any]]) -> list[Row]:
    raws = [RawRow(number, row) for number, row in enumerate(rows, 2)]
    return list(judged_rows(RowSource("preferences", "votes.csv", iter(raws), {}, "data.columns"), 1000))


def vote(annotator: str | None, label: str | None, **fields: Any) -> dict[str, Any]:
    return {**ASKED, "annotator": annotator, "label": label, **fields}


@given(
    st.lists(st.lists(st.sampled_from(["a", "b", "equal"]), min_size=1, max_size=5), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_single_votes_in_any_order_on_any_side_are_the_pairs_of_a_wide_table(
    answers: list[list[str]], drawn: random.Random
) -> None:
    swapped = {"a": "b", "b": "a", "equal": "equal"}
    wide, single = [], []
    for i, labels in enumerate(answers):
        asked = {"prompt": f"Which, {i}?", "a": "tea", "b": f"coffee {i}", "category": "drinks"}
        named = [{"annotator": f"ann {j}", "label": label} for j, label in enumerate(labels)]
        wide.append({**asked, "votes": named})
        for each in named:
            turned = drawn.random() < 0.5
            sides = {"a": asked["b"], "b": asked["a"]} if turned else {}
            single.append({**asked, **sides, "annotator": each["annotator"],
                           "label": (swapped[each["label"]] if turned else each["label"]).upper()})  # fmt: skip
    drawn.shuffle(single)

    def said(rows: list[Row]) -> list[Any]:
        found = []
        for row in rows:
            item = {name: value for name, value in (row.item or {}).items() if name != "row"}
            if row.problems:  # a tie: which response is called chosen follows the sides
                assert [p.text for p in row.problems] == ["tie"] and row.ballot is not None
                item = {"prompt": item["prompt"], "both": sorted([item["chosen"], item["rejected"]])}
            found.append((str(item["prompt"]), item, len(row.votes)))
        return sorted(found, key=lambda each: each[0])

    assert said(judged(single)) == said(judged(wide))


def test_a_pair_has_the_number_the_sides_and_the_fields_of_its_first_row() -> None:
    turned = {"a": "coffee", "b": "tea"}
    rows = [
        vote("ann", "a", category="drinks"),
        vote("ben", "a", **turned),
        vote("cy", "equal", **turned),
        vote("di", "a"),
    ]
    (row,) = judged(rows)
    assert (row.number, row.ballot, row.item and row.item["chosen"]) == (2, Ballot(2, 1, 1), "tea")
    assert row.votes == (("ann", 0), ("ben", 1), ("cy", 2), ("di", 0)) and row.first_wins
    assert row.item is not None and row.item["category"] == "drinks" and row.item["soft_label"] == 0.625


def test_a_vote_that_is_no_vote_or_is_cast_twice_is_named_by_its_own_row_and_the_others_count() -> None:
    rows = [vote("ann", "a"), vote("ben", "c"), vote("ann", "b"), vote("cy", None), vote(None, "a"), vote(None, "a")]
    found = {row.number: row for row in judged(rows)}
    assert sorted(found) == [2, 3, 4]
    assert [p.text for p in found[3].problems] == [
        "vote 'c', expected a, b (also model_a, first and the like), tie or both_bad; say what others mean with "
        "data.label_values, as {'1': a, '2': b}"
    ]
    assert [p.text for p in found[4].problems] == ["annotator 'ann' votes twice on this pair, first in row 2"]
    assert found[3].data == rows[1], "the quarantine file shows the row as it came"
    assert (found[2].problems, found[2].ballot) == ([], Ballot(3, 0, 0))


def test_a_pair_whose_first_vote_is_none_has_the_number_of_the_next() -> None:
    found = {row.number: row for row in judged([vote("ann", "?"), vote("ben", "b"), vote("cy", "b")])}
    assert found[2].problems and found[3].ballot == Ballot(0, 2, 0) and found[3].others == (4,)


def test_the_column_may_be_called_vote_and_a_row_without_a_response_stops_nothing() -> None:
    rows = [{"prompt": "q", "a": "x", "b": "y", "annotator": "ann", "vote": "b"}]
    rows += [{"prompt": "q", "a": "x", "annotator": "ann", "vote": "a"}]
    good, bad = judged(rows)
    assert good.ballot == Ballot(0, 1, 0)
    assert [p.text for p in bad.problems] == ["`b` is missing"]


def test_a_pair_on_which_every_vote_is_missing_is_put_aside() -> None:
    (row,) = judged([vote("ann", None), vote("ben", " ")])
    assert [p.check for p in row.problems] == ["votes_valid"]


def test_a_row_of_a_whole_pair_among_single_votes_keeps_its_votes() -> None:
    whole = {"prompt": "q", "a": "x", "b": "y", "votes": ["a", "a", "b"]}
    found = {row.number: row.ballot for row in judged([vote("ann", "a"), whole, vote("ben", "a")])}
    assert found == {2: Ballot(2, 0, 0), 3: Ballot(2, 1, 0)}
