"""Compute which win rate a number of items and raters can detect, before people spend time on judging."""

import functools
import json
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.text import counted
from components.human_eval.sheet import RATERS, rater_file
from components.stats.raters import power, smallest_found, too_few_raters

CHANCE = 0.8
"""A win rate counts as detectable if it is found with at least this chance, the usual power of a study."""
DRAWS = 2000
"""Number of simulated studies behind each chance; its standard error is then at most 1.1 points."""
_WIN_RATES = (0.55, 0.6, 0.65, 0.7, 0.75, 0.8)


class SamplePlan(NamedTuple):
    """A sample to judge: items, raters, and what is expected of the answers."""

    items: int
    raters: int
    per_item: int
    """Ratings of each item."""
    ties: float = 0.15
    """Share of ratings that are ties or `both_bad`."""
    rater_spread: float = 0.3
    """How much raters differ in their preference for the policy: standard deviation of the logit; 1 is much."""

    def checked(self) -> "SamplePlan":
        """Return the plan unchanged if it is possible.

        Raises:
            UserError: no such sample can be judged.
        """
        if self.items < 2:
            raise UserError(f"--items {self.items}: at least 2 are needed.")
        if not 1 <= self.per_item <= self.raters:
            raise UserError(f"--per-item {self.per_item}: an item is rated by 1 to {self.raters} (--raters) people.")
        if not 0 <= self.ties < 0.9:
            raise UserError(f"--ties {self.ties}: give a share from 0 to 0.9, for example 0.15.")
        if not 0 <= self.rater_spread <= 5:
            raise UserError(f"--rater-spread {self.rater_spread}: give 0 to 5; 0.3 is little, 1 is much.")
        return self


class Findable(NamedTuple):
    """The win rates that a plan can detect."""

    plan: SamplePlan
    power: dict[float, float]
    """Maps a true win rate to the chance that the lower end of its interval is above 0.5."""
    smallest: float | None
    """The smallest win rate that is found with a chance of `CHANCE`; None if there is none."""

    def as_json(self) -> str:
        """Return the result as one JSON object."""
        rows = [{"win_rate": rate, "power": power_at} for rate, power_at in self.power.items()]
        few = too_few_raters(self.plan.raters)
        fields = {"power": rows, "smallest_found": self.smallest, "chance": CHANCE, "too_few_raters": few}
        return json.dumps(self.plan._asdict() | fields)

    def text(self) -> str:
        """Return the result as text for a terminal."""
        plan = self.plan
        lines = [
            f"{counted(plan.items, 'item')}, {counted(plan.raters, 'rater')}, {plan.per_item} of them on each item; "
            f"{plan.ties:.0%} ties; raters differ by {plan.rater_spread} (standard deviation of the logit).",
            "",
            "true win rate   chance that human_eval/win_rate_low is above 0.5",
            *(f"{rate:13.2f}   {power_at:.2f}" for rate, power_at in self.power.items()),
            "",
            sentence(plan, self.smallest),
        ]
        return "\n".join(lines)


def findable(plan: SamplePlan) -> Findable:
    """Simulate studies and return which win rates a plan can detect.

    Raises:
        UserError: as `SamplePlan.checked`.
    """
    plan.checked()
    rates = [rate for rate in _WIN_RATES if rate < 1 - plan.ties / 2]
    items, raters, per_item, ties, spread = plan
    powers = {r: power(items, raters, per_item, r, ties, rater_spread=spread, draws=DRAWS) for r in rates}
    return Findable(plan, powers, _smallest(plan))


@functools.cache
def _smallest(plan: SamplePlan) -> float | None:
    items, raters, per_item, ties, spread = plan
    return smallest_found(items, raters, per_item, ties, rater_spread=spread, chance=CHANCE, draws=DRAWS // 10)


def sentence(plan: SamplePlan, smallest: float | None) -> str:
    """Return one or two sentences on what a plan can detect."""
    people = f"{counted(plan.items, 'item')} and {counted(plan.raters, 'rater')}"
    if smallest is None:
        text = f"{people} find no win rate above 0.5 with a chance of {CHANCE:.0%}, however good the policy is."
    else:
        text = f"{people} find a win rate of {smallest:.2f} or better with a chance of {CHANCE:.0%}."
    few = too_few_raters(plan.raters)
    return f"{text} {few[0].upper()}{few[1:]}" if few else text


def finds(items: int, raters: int) -> str:
    """Return one or two sentences on what a sheet can detect if every rater rates every item."""
    plan = SamplePlan(items, raters, raters)
    return sentence(plan, _smallest(plan))


def waiting(folder: Path, sample: Path) -> str:
    """Return what to do with a run (its folder) that waits for labels of a sample, and what they can detect."""
    sheet = json.loads((sample / "sheet.json").read_text(encoding="utf-8"))
    raters, score, run = sheet["raters"], "tether people score", folder.name
    return (
        f"Waiting for people's labels. `tether people page {run}` serves a page on which people judge. Or give each "
        f"rater their own file from {folder / RATERS} ({rater_file(1)} to {rater_file(raters)}), and nothing else of "
        f"that run: its report reveals the authors. Put the filled files back there and run "
        f"`{score} {folder / RATERS} --run {run}`; a sheet with all raters' columns also works: "
        f"`{score} {folder / 'sheet.csv'} --run {run}`. {finds(sheet['items'], raters)}"
    )
