"""The bench of the review page fails where an answer is lost, doubled or another."""

from collections import Counter

from tests.bench.review import differences, unlike

MEANT = {("Ada", "1"): "a", ("Ada", "2"): "tie", ("Bo", "1"): "b"}


def test_what_counts_as_it_was_meant_is_no_difference() -> None:
    assert differences(MEANT, list(MEANT.items())) == []


def test_lost_doubled_changed_and_foreign_answers_are_each_told() -> None:
    counted = [(("Ada", "1"), "b"), (("Bo", "1"), "b"), (("Bo", "1"), "b"), (("Cy", "1"), "a")]
    assert sorted(differences(MEANT, counted)) == [
        "Ada of 1 is b, not a", "Ada of 2 is lost", "Bo of 1 counts 2 times", "Cy of 1 was never given",
    ]  # fmt: skip


def test_a_row_of_votes_that_nobody_sent_or_that_is_missing_is_told_though_it_may_not_count() -> None:
    sent = Counter({("Ada", "1", "a"): 2, ("Ada", "1", None): 1, ("Bo", "1", "tie"): 1})
    assert unlike(sent, Counter(sent)) == []
    stored = Counter({("Ada", "1", "a"): 3, ("Bo", "1", "tie"): 1, ("Bo", "2", "b"): 1})
    assert unlike(sent, stored) == [
        "Ada, item 1, a: stored 3 times, sent 2", "Ada, item 1, taken back: stored 0 times, sent 1",
        "Bo, item 2, b: stored 1 times, sent 0",
    ]  # fmt: skip
