"""What `tether people power` promises, and what it refuses."""

import json

import pytest

from components.base.errors import UserError
from components.stats.raters import power
from flows.reports import plan as planning
from flows.reports.plan import SamplePlan, findable, finds


def test_a_plan_says_what_is_found_how_surely_and_when_raters_are_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 5: `items: 48` found a true 0.60 in 60 of 100, and nothing said so."""
    monkeypatch.setattr(planning, "DRAWS", 60)
    found = findable(SamplePlan(48, 3, 3))
    told = json.loads(found.as_json())
    rates = [row["power"] for row in told["power"]]
    assert rates == sorted(rates) and rates[0] < 0.5 < rates[-1]
    assert told["power"][1] == {"win_rate": 0.6, "power": power(48, 3, 3, 0.6, draws=60)}
    assert 0.6 < told["smallest_found"] < 0.8 and told["chance"] == 0.8
    assert "3 raters are too few" in told["too_few_raters"]
    text = found.text()
    assert (
        f"48 items and 3 raters find a win rate of {told['smallest_found']:.2f} or better with a chance of 80%" in text
    )
    assert text.endswith("Have 8 or more people rate.")


def test_one_rater_finds_nothing_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect 5: more items of one rater do not tell how people differ."""
    monkeypatch.setattr(planning, "DRAWS", 20)
    assert finds(200, 1).startswith("200 items and 1 rater find no win rate above 0.5")


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (SamplePlan(1, 3, 3), "--items 1"),
        (SamplePlan(48, 3, 4), "--per-item 4: an item is rated by 1 to 3"),
        (SamplePlan(48, 3, 3, ties=0.95), "--ties 0.95"),
        (SamplePlan(48, 3, 3, rater_spread=-1), "--rater-spread -1"),
    ],
)
def test_a_plan_that_can_not_be_is_the_users_mistake(plan: SamplePlan, said: str) -> None:
    with pytest.raises(UserError, match=said):
        findable(plan)
