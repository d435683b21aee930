"""Does the estimated share of flipped labels hold the planted one, where judgements are pairs or rankings?

    python -m tests.bench.statistics.noise [--simulations 100]       # make bench-noise

draws replies of a quality that their words show, judged with noise (a better reply wins with probability
expit(6 times the difference), of which nothing is a flip). Labels are flipped pair by pair, or a ranking of four, which
makes six pairs, is reversed whole. Prints the table of docs/benchmarks/data.md, of
1,500 pairs.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from scipy.special import expit

from data_contracts.findings.noise import LabelNoise, label_noise
from tests.bench.tools import argument_parser

GOOD = "thanks refund solved sorry arrives track".split()
BAD = "cannot never no idle wait".split()
FILL = [f"w{n}" for n in range(400)]
Kind = Literal["single pairs", "rankings, by pair", "rankings, whole"]
KINDS: tuple[Kind, ...] = ("single pairs", "rankings, by pair", "rankings, whole")
RANKED = 4


class Judged(NamedTuple):
    """Pairs of texts, and the prompt of each."""

    chosen: list[str]
    rejected: list[str]
    prompts: list[int]


def judged_pairs(kind: Kind, pairs: int, flips: float, random: np.random.Generator) -> Judged:
    """At least `pairs` pairs of which the share `flips` is flipped."""
    found = Judged([], [], [])
    size = 2 if kind == "single pairs" else RANKED
    while len(found.chosen) < pairs:
        quality = random.normal(size=size)
        utility = quality + random.gumbel(size=size) / 6
        texts = [_reply(each, random) for each in quality]
        prompt, reverse = len(set(found.prompts)), random.random() < flips
        for first, second in itertools.combinations(range(size), 2):
            wrong = reverse if kind == "rankings, whole" else random.random() < flips
            better, worse = (first, second) if (utility[first] > utility[second]) != wrong else (second, first)
            found.chosen.append(texts[better])
            found.rejected.append(texts[worse])
            found.prompts.append(prompt)
    return found


def _reply(quality: float, random: np.random.Generator) -> str:
    telling = [random.choice(GOOD if random.random() < expit(2 * quality) else BAD) for _ in range(5)]
    return " ".join(random.permutation([*telling, *random.choice(FILL, random.integers(8, 18))]))


def estimates(kind: Kind, flips: float, seeds: Sequence[int], pairs: int = 1500) -> list[LabelNoise]:
    """The estimates of as many data sets; those without an estimate are left out."""
    found = []
    for seed in seeds:
        judged = judged_pairs(kind, pairs, flips, np.random.default_rng(seed))
        estimate = label_noise(judged.chosen, judged.rejected, seed, judged.prompts)
        if isinstance(estimate, LabelNoise):
            found.append(estimate)
    return found


def rows(simulations: int) -> Iterator[str]:
    """A line for each kind and share."""
    yield "| judgements | flipped | estimate (5 to 95 %) | interval holds it | lower end above 0 |"
    yield "|---|---|---|---|---|"
    for kind in KINDS:
        for flips in (0.0, 0.1, 0.2):
            found = estimates(kind, flips, range(simulations))
            low, middle, high = np.quantile([each.value for each in found], [0.05, 0.5, 0.95])
            holds, noisy = np.mean([(e.low <= flips <= e.high, e.low > 0) for e in found], axis=0)
            yield f"| {kind} | {flips} | {middle:.2f} ({low:.2f} to {high:.2f}) | {holds:.0%} | {noisy:.0%} |"


def main(given: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argument_parser(__doc__)
    parser.add_argument("--simulations", type=int, default=100)
    for line in rows(parser.parse_args(given).simulations):
        print(line, flush=True)


if __name__ == "__main__":
    main()
