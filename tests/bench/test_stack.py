"""What the bench of the stack counts."""

import pytest

from tests.bench.stack import at_once, grown


@pytest.mark.parametrize(
    ("spans", "most"),
    [
        ([], 0),
        ([("10:00", "10:05"), ("10:05", "10:09")], 1),
        ([("10:00", "10:05"), ("10:01", "10:03"), ("10:03", "10:06")], 2),
        ([("10:00", "10:09"), ("10:01", "10:08"), ("10:02", "10:03")], 3),
    ],
)
def test_runs_that_overlap_are_counted_and_one_that_begins_as_another_ends_is_not(
    spans: list[tuple[str, str]], most: int
) -> None:
    assert at_once(spans) == most


def test_a_part_that_grows_by_more_than_a_tenth_and_20_mb_is_named() -> None:
    assert grown({"a": 100.0, "b": 100.0, "c": 5.0}, {"a": 129.0, "b": 131.0, "c": 25.0}) == ["b"]
