"""Do the statistics of people's ratings keep their promises, where raters differ and somebody looks early?

    python -m tests.bench.raters [--simulations 2000] [--part coverage|looks|power]

simulates ratings (a tie with probability 0.15, else a win with probability expit(a + item + rater), items' SD 1) and
prints the tables of docs/benchmarks/people.md: how often the interval over prompts and raters holds the win rate that
all people would give, how often a look after every item promotes an equal policy, and what `tether human-eval plan`
says beside what happens.
"""

import argparse
import functools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from scipy import special
from scipy.optimize import brentq

from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.raters import crossed_proportion, power, too_few_raters
from flows.reports.plan import DRAWS

TIES, ITEM_SPREAD = 0.15, 1.0


class Design(NamedTuple):
    """Items, raters, and how many of them rate each item."""

    items: int
    raters: int
    per_item: int

    def __str__(self) -> str:
        each = "all" if self.per_item == self.raters else str(self.per_item)
        return f"{self.items} | {self.raters} | {each}"


class Ratings(NamedTuple):
    """Simulated ratings, arrays (n,)."""

    scores: np.ndarray
    items: np.ndarray
    raters: np.ndarray


FEW = [Design(128, 3, 3), Design(512, 3, 3), Design(128, 5, 5)]
ENOUGH = [Design(128, 8, 8), Design(512, 8, 3), Design(256, 8, 3), Design(128, 12, 3), Design(256, 20, 3)]
SPREADS = (0.3, 0.6, 1.0)


@functools.cache
def intercept(win_rate: float, rater_spread: float) -> float:
    """The mean logit at which the win rate over all items and people, ties a half, is `win_rate`."""
    spread = math.hypot(ITEM_SPREAD, rater_spread)
    grid = np.linspace(-8, 8, 4001)
    weights = np.exp(-np.square(grid) / 2) / np.exp(-np.square(grid) / 2).sum()
    decided = (win_rate - TIES / 2) / (1 - TIES)
    return float(brentq(lambda a: weights @ special.expit(a + spread * grid) - decided, -20, 20))


def simulate(design: Design, win_rate: float, rater_spread: float, random: np.random.Generator) -> Ratings:
    """Ratings of one study."""
    items = np.repeat(np.arange(design.items), design.per_item)
    raters = random.permuted(np.tile(np.arange(design.raters), (design.items, 1)), axis=1)[:, : design.per_item].ravel()
    each = intercept(win_rate, rater_spread) + random.normal(0, ITEM_SPREAD, design.items)[items]
    each = each + random.normal(0, rater_spread, design.raters)[raters]
    wins = (random.random(len(items)) < special.expit(each)).astype(float)
    return Ratings(np.where(random.random(len(items)) < TIES, 0.5, wins), items, raters)


class Coverage(NamedTuple):
    """How often `crossed_proportion` holds the win rate of all people."""

    covered: float
    half_width: float
    """Of the median interval."""
    says_too_few: bool


def coverage(design: Design, rater_spread: float, win_rate: float, simulations: int, seed: int = 0) -> Coverage:
    """Simulate studies of a design, with new items and new people each time."""
    random, held, widths = np.random.default_rng(seed), 0, []
    for _ in range(simulations):
        scores, items, raters = simulate(design, win_rate, rater_spread, random)
        found = crossed_proportion(scores, items, raters)
        held += found.low <= win_rate <= found.high
        widths.append((found.high - found.low) / 2)
    return Coverage(held / simulations, float(np.median(widths)), too_few_raters(design.raters) is not None)


def early_stops(items: int, raters: int, spread: float, fixed: bool, simulations: int, seed: int = 0) -> float:
    """How often the bound, looked at after every item, passes 0.5 for a policy that is equal.

    Args:
        fixed: the policy is equal to these raters (their habits sum to 0), and the bound is theirs; else to all people,
            of whom these are some.
    """
    random, wrong = np.random.default_rng(seed), 0
    for _ in range(simulations):
        habits = random.normal(0, spread, raters)
        logit = random.normal(0, ITEM_SPREAD, items)[:, None] + (habits - habits.mean() if fixed else habits)
        share = special.expit(logit)
        if fixed:  # equal to these raters exactly: half of the items are the other half with sides exchanged
            share[1::2] = 1 - share[: items - items % 2 : 2]
            share = random.permutation(share)
        wins = random.random(share.shape) < share
        scores = np.where(random.random(share.shape) < TIES, 0.5, wins)
        low = always_valid_low(scores.mean(axis=1)) if fixed else always_valid_low_of_people(scores)
        wrong += bool((low > 0.5).any())
    return wrong / simulations


def coverage_rows(simulations: int) -> Iterator[str]:
    """A line of the table for each design and spread."""
    yield "| items | raters | each item by | rater SD | covered | half width | the result says |"
    yield "|---|---|---|---|---|---|---|"
    for design in [*FEW, *ENOUGH]:
        for spread in SPREADS:
            found = coverage(design, spread, 0.6, simulations)
            says = "too few raters" if found.says_too_few else "the interval"
            yield f"| {design} | {spread} | {found.covered:.1%} | {found.half_width:.3f} | {says} |"


def look_rows(simulations: int) -> Iterator[str]:
    """A line for each kind of raters."""
    yield "| items | raters | rater SD | equal to | promoted |"
    yield "|---|---|---|---|---|"
    for items, raters, spread, fixed in (
        (256, 1, 0.0, True), (256, 3, 0.3, True), (256, 3, 1.0, True), (256, 8, 0.3, True), (256, 8, 1.0, True),
        (256, 3, 0.3, False), (256, 3, 1.0, False), (256, 8, 0.3, False), (256, 8, 1.0, False), (256, 20, 1.0, False),
    ):  # fmt: skip
        to = "these raters" if fixed else "all people"
        yield f"| {items} | {raters} | {spread} | {to} | {early_stops(items, raters, spread, fixed, simulations):.1%} |"


def power_rows(simulations: int) -> Iterator[str]:
    """A line for each design and true win rate: what the plan says, and what happened."""
    yield "| items | raters | each item by | rater SD | win rate | plan | happened |"
    yield "|---|---|---|---|---|---|---|"
    for design in (Design(48, 3, 3), Design(128, 10, 3), Design(256, 8, 3), Design(128, 20, 5)):
        for spread in (0.3, 1.0):
            for rate in (0.55, 0.6, 0.65):
                said = power(*design, rate, TIES, rater_spread=spread, draws=DRAWS)
                random, found = np.random.default_rng(99), 0
                for _ in range(simulations):
                    scores, items, raters = simulate(design, rate, spread, random)
                    found += crossed_proportion(scores, items, raters).low > 0.5
                yield f"| {design} | {spread} | {rate} | {said:.3f} | {found / simulations:.3f} |"


PARTS = {"coverage": coverage_rows, "looks": look_rows, "power": power_rows}


def main(given: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--part", choices=PARTS, action="append")
    asked = parser.parse_args(given)
    for name in asked.part or PARTS:
        print(f"\n{name}, {asked.simulations} simulations a cell\n", flush=True)
        for line in PARTS[name](asked.simulations):
            print(line, flush=True)


if __name__ == "__main__":
    main()
