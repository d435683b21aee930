"""Which pairs their votes decide, and which go to experts."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.data.config import DataConfig, DecisionConfig
from components.data.rows import RawRow
from data_contracts.rows.decided import by_votes
from data_contracts.rows.gather import RowSource, judged_rows
from flows.config.run_config import load_config

PAIR = {"prompt": "hi", "a": "x", "b": "y"}


def votes(*labels: str, expert: str = "") -> list[dict[str, str]]:
    named = [{"annotator": f"p{n}", "label": label} for n, label in enumerate(labels)]
    return [*named, {"annotator": "ann", "label": expert}] if expert else named


def judged(data: dict[str, Any], name: str = "votes", **config: Any) -> Any:
    (row,) = by_votes(RawRow(1, data), name, "preferences", 1000, DecisionConfig(**config))
    return row


def told(row: Any) -> str:
    return "; ".join(problem.text for problem in row.problems if problem.check == "decided")


def test_pairs_that_tether_gave_out_need_three_votes_and_others_one() -> None:
    for labels in ((), ("a",), ("a", "a")):
        ours = {**PAIR, "id": "tether-00001-abcdef01", "votes": votes(*labels, "a")}
        expected = f"{len(labels) + 1} of the 3 votes that decide a pair" if len(labels) < 2 else ""
        assert told(judged(ours)).startswith(expected) and bool(told(judged(ours))) == bool(expected)
        assert told(judged({**PAIR, "votes": votes(*labels, "a")})) == "", "as before, of any other source"
    of_batch = {**PAIR, "judged_in": "0a1b2c3d", "votes": votes("a")}
    assert told(judged(of_batch)).startswith("1 of the 3 votes"), "votes on a policy's samples are ours too"
    assert told(judged({**of_batch, "votes": votes("a", "tie", "a")})) == ""
    assert told(judged({**PAIR, "id": "tether-1", "votes": votes("a")}, minimum=1)) == ""
    assert "1 of the 2 votes" in told(judged({**PAIR, "votes": votes("a")}, minimum=2))
    assert told(judged({**PAIR, "id": "tether-00001-abcdef01", "label": "a"})) == "", "a label is no vote"
    counted = {"prompt": "hi", "chosen": "x", "rejected": "y", "votes_chosen": 2, "votes": 2}
    assert "2 of the 3 votes" in told(judged(counted, "strings", minimum=3))


@given(st.lists(st.sampled_from(["a", "b", "tie"]), min_size=1, max_size=9), st.integers(0, 9))
def test_a_lead_at_or_below_the_margin_goes_to_experts_and_a_wider_one_does_not(labels: list[str], step: int) -> None:
    margin = step / 10
    counts = sorted(labels.count(label) for label in ("a", "b", "tie"))
    lead = (counts[-1] - counts[-2]) / len(labels)
    row = judged({**PAIR, "votes": votes(*labels)}, margin=margin)
    undecided = lead <= margin + 1e-9 or labels.count("tie") == counts[-1]
    assert bool(told(row)) == undecided
    assert not undecided or row.data["votes"] == votes(*labels), "the row stands whole in review.jsonl"


def test_two_against_one_is_decided_unless_the_margin_asks_for_more() -> None:
    row = {**PAIR, "votes": votes("a", "b", "a")}
    assert told(judged(row)) == "" and told(judged(row, margin=0.3)) == ""
    assert told(judged(row, margin=1 / 3)) == "narrow: 2 of 3 votes against 1 (data.decision.margin)"


def test_an_experts_answer_decides_alone_and_the_others_still_count_in_agreement() -> None:
    row = judged({**PAIR, "votes": votes("a", "a", "b", expert="b")}, experts=("ann",), minimum=3, margin=0.5)
    assert row.problems == [] and row.item["chosen"] == "y" and row.item["soft_label"] == 1.0
    assert tuple(row.ballot) == (2, 2, 0) and len(row.votes) == 4
    undecided = judged({**PAIR, "votes": votes("a", "a", "b", expert="tie")}, experts=("ann",))
    assert told(undecided) == "tie" and undecided.data["votes"][-1]["annotator"] == "ann"


def test_a_model_of_the_annotators_leaves_no_majority_to_ask_for() -> None:
    with pytest.raises(ValueError, match=r"decision applies to labels=majority only"):
        DataConfig(labels="dawid_skene", decision=DecisionConfig(minimum=3))
    assert load_config("demo").data.decision == DecisionConfig(), "and nothing of the demo changes"


def test_what_the_config_says_reaches_the_rows_of_a_file(tmp_path: Any) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({**PAIR, "votes": votes("a", "a", "b")}) + "\n")
    data = DataConfig(decision=DecisionConfig(margin=0.34))
    (row,) = judged_rows(RowSource.named("preferences", tmp_path / "p.jsonl", data), 1000)
    assert told(row).startswith("narrow: 2 of 3 votes against 1")
