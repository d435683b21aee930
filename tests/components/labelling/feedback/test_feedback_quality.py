"""Votes of two orders, and what is measured of a judge whose bias is planted."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.labelling.feedback.answers import BothOrders
from components.labelling.feedback.feedback_quality import judge_report
from components.labelling.feedback.feedback_votes import PairToJudge, preference, vote, vote_rows
from components.stats.intervals import clustered_proportion
from components.stats.raters import crossed_agreement

PROBABILITY = st.floats(0, 1)


def both(given: float | None, swapped: float | None) -> BothOrders:
    return BothOrders({"first": given}, {"first": swapped})


def pair(n: int, votes: Any = (), a: str = "short", b: str = "a longer one") -> PairToJudge:
    return PairToJudge(n, [{"role": "user", "content": f"question {n // 2}"}], f"{a} {n}", f"{b} {n}", tuple(votes), {})


@given(PROBABILITY, PROBABILITY)
def test_exchanging_the_sides_of_a_pair_reverses_its_preference(given_: float, swapped: float) -> None:
    for rule in ("mean", "agree"):
        here, there = preference(both(given_, swapped), rule), preference(both(swapped, given_), rule)
        assert here is not None and there is not None and here + there == pytest.approx(1)


@given(st.floats(0, 0.5))
def test_a_judge_that_only_prefers_a_position_votes_for_neither_side(bias: float) -> None:
    answers = both(0.5 + bias, 0.5 + bias)
    assert [vote(preference(answers, rule) or 0.0) for rule in ("mean", "agree")] == [2, 2]


def test_the_mean_decides_where_the_orders_differ_and_agree_does_not() -> None:
    answers = both(0.9, 0.7)  # a with 0.9 and with 0.3
    assert preference(answers, "mean") == pytest.approx(0.6) and preference(answers, "agree") == 0.5
    assert preference(both(0.9, None), "mean") is None and preference(both(None, 0.1), "agree") is None


def test_a_planted_bias_is_measured_exactly() -> None:
    """Of ten pairs the judge answers A whatever it sees on four, and people's side on six; one more is unreadable.

    The first four give 1 each of `first`, the others a half: (4 + 6 / 2) / 10 = 0.7. Six are consistent; agreement is
    (4 / 2 + 6) / 10 = 0.8. People prefer `b`, the longer, on the odd pairs.
    """
    people = [[("ann", n % 2), ("bob", n % 2), ("eve", (n + 1) % 2)] for n in range(11)]
    pairs = [pair(n, votes) for n, votes in enumerate(people)]
    answers = {each.id: both(1.0, 1.0) if n < 4 else both(1.0 - n % 2, float(n % 2)) for n, each in enumerate(pairs)}
    answers[pairs[10].id] = both(None, 1.0)
    found = judge_report(pairs, answers, "mean")
    prompts = [n // 2 for n in range(10)]
    first = clustered_proportion([1.0] * 4 + [0.5] * 6, prompts)
    assert (found["pairs"], found["unreadable"], found["prompts"]) == (11, 1, 6)
    assert [found[f"first{end}"] for end in ("", "_low", "_high")] == pytest.approx([0.7, first.low, first.high])
    assert found["position_bias"] == pytest.approx(0.2)
    assert found["position_bias_high"] == pytest.approx(first.high - 0.5)
    consistent = clustered_proportion([0.0] * 4 + [1.0] * 6, prompts)
    assert found["consistent"] == 0.6 and found["consistent_low"] == pytest.approx(consistent.low)
    assert found["votes"] == {"a": 3, "b": 3, "tie": 4}
    assert found["longer"] == 0.5, "three of the six decided votes are for b, the longer"
    sides = [[s if n % 2 == 0 else -s for s in (1, 1, -1)] for n in range(10)]
    crossed = crossed_agreement(sides, [0.0] * 4 + [0.5 - n % 2 for n in range(4, 10)], prompts)
    assert [found[f"agreement{end}"] for end in ("", "_low", "_high")] == pytest.approx(
        [0.8, crossed.low, crossed.high]
    )
    assert (found["interval_over"], found["people"]) == ("prompts and people", 3)
    assert found["decided_by_people"] == 10 and found["longer_agreement"] == 0.5


def test_unnamed_votes_give_an_interval_over_prompts_and_a_models_votes_are_not_peoples() -> None:
    pairs = [pair(n, [(None, 0), ("model:old", 1), ("model:old2", 1)]) for n in range(4)]
    found = judge_report(pairs, {each.id: both(1.0, 0.0) for each in pairs}, "mean")
    assert found["agreement"] == 1.0 and found["interval_over"] == "prompts" and "people" not in found
    assert found["longer_agreement"] == 0.0
    without = judge_report([pair(0)], {pair(0).id: both(1.0, 0.0)}, "mean")
    assert "agreement" not in without


def test_pairs_that_people_leave_undecided_do_not_count_in_the_agreement() -> None:
    """People prefer b, the longer, on pairs 1 to 3 and tie on pair 0, which the judge gives to a as it does pair 1."""
    pairs = [pair(0, [(None, 0), (None, 1)])] + [pair(n, [(None, 1)]) for n in range(1, 4)]
    answers = {each.id: both(1.0, 0.0) if each.row < 2 else both(0.0, 1.0) for each in pairs}
    found = judge_report(pairs, answers, "mean")
    assert found["decided_by_people"] == 3 and found["agreement"] == pytest.approx(2 / 3)
    assert found["longer_agreement"] == 1.0 and found["votes"] == {"a": 2, "b": 2, "tie": 0}


def test_votes_keep_those_of_people_and_replace_the_models_own() -> None:
    first, second = pair(0, [("ann", 1), (None, 2), ("model:m", 1), ("model:other", 0)]), pair(1)
    answers = {first.id: both(0.9, 0.2), second.id: both(None, None)}
    (row,) = vote_rows([first, second], answers, "m", "mean", alone=False)
    assert row["votes"] == [
        {"annotator": "ann", "label": "b"}, {"label": "tie"}, {"annotator": "model:other", "label": "a"},
        {"annotator": "model:m", "label": "a", "preference": pytest.approx(0.85)},
    ]  # fmt: skip
    (row,) = vote_rows([first, second], answers, "m", "mean", alone=True)
    assert [each["annotator"] for each in row["votes"]] == ["model:m"]
