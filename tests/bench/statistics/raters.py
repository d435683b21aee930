"""Do the statistics of people's ratings keep their promises, where raters differ and somebody looks early?

    python -m tests.bench.statistics.raters [--simulations 2000] [--part coverage|looks|power|checks|offenders]

simulates ratings (a tie with probability 0.15, else a win with probability expit(a + item + rater), items' SD 1) and
prints the tables of docs/benchmarks/people.md: how often the interval over prompts and raters holds the win rate that
all people would give, how often a look after every item promotes an equal policy, and what `tether people power`
says beside what happens. The parts `checks` and `offenders` (`make bench-raters`) print how often hh-smollm2's gates on
raters fail where everybody is honest, and how often the result names one who does not rate honestly.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy import special
from scipy.optimize import brentq

from components.gates.judging import GatesConfig, judge
from components.human_eval.results.checks import attention_check, rater_checks
from components.human_eval.returned_labels import Labels, Sample
from components.stats.betting import always_valid_low, always_valid_low_of_people
from components.stats.raters import crossed_proportion, power, too_few_raters
from flows.config.run_config import load_config
from flows.reports.plan import DRAWS
from tests.bench.tools import argument_parser

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


class Study(NamedTuple):
    """Items, people, and how many of them rate each; shares as in hh-smollm2."""

    items: int
    people: int
    per_item: int
    repeats: float = 0.25
    attention: float = 0.2
    quality: tuple[float, float] = (0.75, 0.95)
    """How often people prefer the better reply."""
    care: tuple[float, float] = (0.95, 0.99)
    """How often they are right in attention checks."""


Offence = Literal["always a", "copies", "coin", "coin and ties", "any answer"]
AT_RANDOM: dict[Offence, list[float]] = {
    "coin": [0.5, 0.5, 0], "coin and ties": [0.425, 0.425, 0.15], "any answer": [1 / 3] * 3,
}  # fmt: skip
"""Probabilities of a, b and tie."""
OF_RATERS = ("position_bias", "raters_alike", "attention_low")
SHARED = [
    Study(48, 3, 1), Study(48, 3, 3), Study(48, 6, 3), Study(48, 8, 3), Study(48, 20, 1), Study(48, 20, 5),
    Study(96, 4, 1), Study(128, 4, 1), Study(128, 8, 3), Study(128, 12, 2), Study(128, 20, 3), Study(256, 8, 1),
    Study(256, 20, 3), Study(512, 3, 3), Study(512, 12, 1), Study(512, 20, 2), Study(512, 20, 5),
]  # fmt: skip
FORTY = [
    Study(48, 3, 2), Study(48, 3, 3), Study(48, 5, 5), Study(64, 8, 5), Study(128, 4, 1), Study(128, 8, 3),
    Study(160, 12, 3), Study(256, 12, 2), Study(256, 20, 3), Study(256, 8, 2), Study(512, 12, 1), Study(512, 20, 5),
]  # fmt: skip
"""Studies in which a person gives 40 answers or more on average."""


def simulated_study(
    study: Study, random: np.random.Generator, offence: Offence | None = None
) -> tuple[Sample, Labels, Labels]:
    """The sample, ratings and answers to attention checks of people who differ: each prefers the better reply in 75 to
    95 %, says tie in 5 to 30 %, and is right in 95 to 99 % of attention checks. The first person may commit an offence.
    """
    items, people, per_item = study[:3]
    again, known = round(study.repeats * items), round(study.attention * items)
    pairs = np.concatenate([np.arange(items), random.permutation(items)[:again]])
    side = random.integers(0, 2, items)
    side = np.concatenate([side, 1 - side[pairs[items:]]])
    better = np.where(random.random(items) < 0.65, 0, 1)[pairs] ^ side  # the policy's side in 65 %
    right = np.concatenate([better, random.integers(0, 2, known)])
    checks = np.arange(len(right)) >= len(pairs)
    shape = (len(right), people)
    care = np.where(checks[:, None], random.uniform(*study.care, people), random.uniform(*study.quality, people))
    given = np.where(random.random(shape) < care, right[:, None], 1 - right[:, None])
    given[(random.random(shape) < random.uniform(0.05, 0.3, people)) & ~checks[:, None]] = 2
    asked = random.permuted(np.tile(np.arange(people) < per_item, (len(right), 1)), axis=1)
    if offence == "always a":
        given[:, 0] = 0
    elif offence == "copies":
        given[:, 0], asked[:, 0] = given[:, 1], asked[:, 1]
    elif offence:
        given[:, 0] = random.choice(3, len(right), p=AT_RANDOM[offence])
    names = [f"{'t' if check else 'q'}{n:04d}" for n, check in enumerate(checks)]
    rows = np.where(asked, np.array(["a", "b", "tie"])[given], "").tolist()
    labels = {name: tuple(row) for name, row in zip(names, rows, strict=True)}
    own = names[: len(pairs)]
    shown: Any = {own[n]: {"prompt": [{"role": "user", "content": str(pair)}]} for n, pair in enumerate(pairs)}
    sides: Any = {own[n]: "ab"[place] for n, place in enumerate(side)}
    repeat_of = {own[items + n]: own[pairs[items + n]] for n in range(again)}
    attention: Any = {names[n]: "ab"[right[n]] for n in np.flatnonzero(checks)}
    about: Any = {"raters": per_item}
    sample = Sample(Path(), about, sides, shown, repeat_of, attention)
    return sample, {name: labels[name] for name in own}, {name: labels[name] for name in names[len(pairs) :]}


def failing_gates(study: Study, seeds: Iterable[int], helper: bool = False) -> Counter[str]:
    """How often each of hh-smollm2's gates on raters fails, and any of them; a helper copies three answers."""
    gates = load_config("hh-smollm2").gates
    assert isinstance(gates, GatesConfig)
    failed: Counter[str] = Counter()
    for seed in seeds:
        sample, labels, known = simulated_study(study, np.random.default_rng([seed, *map(int, study[:3])]))
        if helper:
            labels = {item: (*row, row[0] if n < 3 else "") for n, (item, row) in enumerate(labels.items())}
            first = next(iter(known))
            known = {item: (*row, sample.attention[item] if item == first else "") for item, row in known.items()}
        attention = attention_check(sample, known, ratings=labels)
        metrics = rater_checks(sample, labels).metrics()
        metrics |= attention.lowest.metrics("human_eval/attention") if attention else {}
        found = [v.name.split(".")[1] for v in judge("human_eval", metrics, gates) if not v.passed]
        own = [name for name in found if name in OF_RATERS]
        failed.update([*own, "any"] if own else [])
    return failed


def names_the_offender(study: Study, offence: Offence, seeds: Iterable[int], least: int = 40) -> tuple[int, int]:
    """How often the result names the first person alone, and in how many studies they gave `least` answers or more."""
    named = studies = 0
    for seed in seeds:
        sample, labels, known = simulated_study(study, np.random.default_rng([seed, *map(int, study[:3])]), offence)
        if sum(bool(row[0]) for row in (*labels.values(), *known.values())) < least:
            continue
        studies += 1
        checks, attention = rater_checks(sample, labels), attention_check(sample, known, ratings=labels)
        assert attention is not None
        by = {"always a": checks.sides, "copies": checks.copies}.get(offence, attention.careless)
        named += ((0, 1) if offence == "copies" else (0,)) in by.named
    return named, studies


def check_rows(simulations: int) -> Iterator[str]:
    """A line for each study: how often the gates fail where everybody is honest."""
    yield "| items | people | each item by | answers of one | position_bias | raters_alike | attention_low | any |"
    yield "|---|---|---|---|---|---|---|---|"
    for study in SHARED:
        failed = failing_gates(study, range(simulations))
        shares = " | ".join(f"{failed[name] / simulations:.1%}" for name in (*OF_RATERS, "any"))
        yield f"| {_described(study)} | {shares} |"


def offender_rows(simulations: int) -> Iterator[str]:
    """A line for each study: how often one with 40 answers or more is named."""
    offences: list[Offence] = ["always a", "copies", *AT_RANDOM]
    yield f"| items | people | each item by | answers of one | {' | '.join(offences)} |"
    yield "|---" * (4 + len(offences)) + "|"
    for study in FORTY:
        found = [names_the_offender(study, offence, range(simulations)) for offence in offences]
        yield f"| {_described(study)} | {' | '.join(f'{named / max(1, n):.1%}' for named, n in found)} |"


def _described(study: Study) -> str:
    answers = study.items * (1 + study.repeats + study.attention) * study.per_item / study.people
    return f"{study.items} | {study.people} | {study.per_item} | {answers:.0f}"


PARTS = {"coverage": coverage_rows, "looks": look_rows, "power": power_rows}
PARTS |= {"checks": check_rows, "offenders": offender_rows}


def main(given: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argument_parser(__doc__)
    parser.add_argument("--simulations", type=int, default=2000)
    parser.add_argument("--part", choices=PARTS, action="append")
    asked = parser.parse_args(given)
    for name in asked.part or PARTS:
        print(f"\n{name}, {asked.simulations} simulations a cell\n", flush=True)
        for line in PARTS[name](asked.simulations):
            print(line, flush=True)


if __name__ == "__main__":
    main()
