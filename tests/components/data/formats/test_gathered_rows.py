"""Vote tables of one row a vote: the same pairs as a table of one row a pair, whatever the order of rows and sides."""

import random
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from components.data.rows import RawRow, Row
from data_contracts.rows.gather import RowSource, judged_rows


def judged(rows: list[dict[str, Any]]) -> list[Row]:
    raws = [RawRow(number, row) for number, row in enumerate(rows, 2)]
    return list(judged_rows(RowSource("preferences", "votes.csv", iter(raws), {}, "data.columns"), 1000))


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
