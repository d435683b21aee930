"""Waiting ends with what is looked for, and early where that can never come."""

import pytest

from tests.waiting import until


def test_what_can_never_come_is_waited_for_no_longer() -> None:
    with pytest.raises(AssertionError, match="the server answers: 3"):
        until("the server answers", lambda: None, failed=lambda: 3)
    with pytest.raises(AssertionError, match="the server answers: 0"):
        until("the server answers", lambda: None, failed=lambda: 0)  # an exit code


def test_what_came_before_the_end_is_found() -> None:
    assert until("it has printed", lambda: "a line", failed=lambda: 0) == "a line"
    left = iter([0, 0, 7])
    assert until("it has begun", lambda: next(left), every=0.001) == 7
