"""A quick sample of the bench: the tables' rows come out, and promises hold within the simulation's own error."""

import pytest

from tests.bench.raters import Design, coverage, early_stops, main


def test_the_interval_covers_and_says_when_raters_are_too_few() -> None:
    enough, few = (coverage(Design(96, raters, 3), 0.6, 0.6, 150, seed=1) for raters in (8, 3))
    assert enough.covered > 0.89 and not enough.says_too_few
    assert few.covered > 0.88 and few.says_too_few and few.half_width > enough.half_width


def test_a_look_at_every_item_seldom_promotes_an_equal_policy() -> None:
    assert early_stops(64, 3, 0.6, True, 150) <= 0.05


def test_the_plan_is_printed_beside_what_happens(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench.raters.DRAWS", 20)
    main(["--simulations", "10", "--part", "power"])
    rows = [line.split("|") for line in capsys.readouterr().out.splitlines() if line.startswith("| ") and "0." in line]
    assert len(rows) == 24 and all(0 <= float(row[-2]) <= 1 and 0 <= float(row[-3]) <= 1 for row in rows)
