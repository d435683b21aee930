"""The bench of the review page fails where an answer is lost, doubled or another."""

from tests.bench.review import differences

MEANT = {("Ada", "1"): "a", ("Ada", "2"): "tie", ("Bo", "1"): "b"}


def test_what_counts_as_it_was_meant_is_no_difference() -> None:
    assert differences(MEANT, list(MEANT.items())) == []


def test_lost_doubled_changed_and_foreign_answers_are_each_told() -> None:
    counted = [(("Ada", "1"), "b"), (("Bo", "1"), "b"), (("Bo", "1"), "b"), (("Cy", "1"), "a")]
    assert sorted(differences(MEANT, counted)) == [
        "Ada of 1 is b, not a", "Ada of 2 is lost", "Bo of 1 counts 2 times", "Cy of 1 was never given",
    ]  # fmt: skip
