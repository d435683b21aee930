"""False alarms where the policy is SFT itself, by what the score pays for.

    python -m tests.bench.statistics.alarm_nulls --jobs 2

SFT's responses and each batch are drawn from one distribution, and each is scored by one feature and noise, so that the
feature explains a stated part r² of the scores' variance. A run counts if any of its updates raises an alarm.
`features` judges the features that a score pays for, by the function that the monitor calls; `monitors` judges whole
batches by all monitors, with texts, n-grams, entropies and KL.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from multiprocessing import Pool

import numpy as np
from scipy import stats

from components.ppo.monitors import score_attribution
from components.ppo.monitors.alarms import SHARED, TESTS, Limits
from components.ppo.monitors.measures import Batch
from components.stats.intervals import FloatArray
from tests.bench.tools import argument_parser

RATE = 0.01
Generator = np.random.Generator


def event(share: float) -> Callable[[Generator, int], FloatArray]:
    """Draw an event that a `share` of responses shows."""
    return lambda rng, size: (rng.random(size) < share).astype(np.float64)


def rare_parts(share: float) -> Callable[[Generator, int], FloatArray]:
    """Draw a number that is 0 in all but a `share` of responses, as repetition is."""
    return lambda rng, size: np.where(rng.random(size) < share, rng.random(size), 0.0)


KINDS: dict[str, Callable[[Generator, int], FloatArray]] = {
    "event, 1 %": event(0.01),
    "event, 5 %": event(0.05),
    "event, 30 %": event(0.3),
    "event, 50 %": event(0.5),
    "event, 95 %": event(0.95),
    "count, mean 0.8": lambda rng, size: rng.poisson(0.8, size).astype(np.float64),
    "length, log-normal 0.4": lambda rng, size: np.exp(rng.normal(3, 0.4, size)).round(),
    "length, log-normal 1.2": lambda rng, size: np.exp(rng.normal(3, 1.2, size)).round(),
    "length, nine in ten at the limit": lambda rng, size: np.minimum(np.exp(rng.normal(5, 0.5, size)).round(), 78.0),
    "repetition, 5 %": rare_parts(0.05),
    "one of three values": lambda rng, size: rng.choice([-1.0, 0.0, 1.0], size, p=[0.05, 0.9, 0.05]),
    "constant": lambda rng, size: np.full(size, 7.0),
}
"""Draws a feature (B,) by its name."""


def scored(rng: Generator, feature: FloatArray, share: float, verifier: bool) -> FloatArray:
    """Return scores (B,) of whose variance the feature explains about `share`; 0 or 1 if a `verifier` gives them."""
    spread = feature.std() or 1.0
    scores = np.sqrt(share) * (feature - feature.mean()) / spread + np.sqrt(1 - share) * rng.normal(size=len(feature))
    return (scores > 0).astype(np.float64) if verifier else scores


def features(kind: str, share: float, batch: int, size: int, updates: int, runs: int, seed: int = 0) -> int:
    """Return how many of `runs` raise an alarm of a feature that explains `share` of the scores' variance.

    Its neighbours are an event that does not matter and one that stands in the same responses.
    """
    rng, level, count = np.random.default_rng([seed, batch, size, updates]), RATE / TESTS / updates, 0
    draw = KINDS[kind]
    for _ in range(runs):
        all_of = draw(rng, size + batch * updates)
        scores = scored(rng, all_of, share, verifier=False)
        scores = (scores - scores[:size].mean()) / (scores[:size].std() or 1.0)
        groups = [slice(0, size)] + [slice(size + batch * u, size + batch * (u + 1)) for u in range(updates)]
        sides = [{"own": all_of[at], "alike": (all_of[at] > all_of.mean()).astype(np.float64)} for at in groups]
        count += any(
            score_attribution.features_of_the_gain(own, scores[at], sides[0], scores[:size], level, SHARED * level)
            for own, at in zip(sides[1:], groups[1:], strict=True)
        )
    return count


PHRASE = "you are so kind to write"
VOCABULARY = [f"w{i}" for i in range(60)]


def drawn(rng: Generator, size: int, share: float, pays: str) -> Batch:
    """Return `size` responses of SFT, in whose scores what `pays` explains a `share` of the variance.

    Args:
        pays: `length`, `phrase` (an event of 20 %), or `verifier`, whose scores are 0 and 1 and which a phrase of 5 %
            passes.
    """
    lengths = np.exp(rng.normal(2.2, 0.6, size)).round() + 1
    says = rng.random(size) < (0.05 if pays == "verifier" else 0.2)
    texts = [
        " ".join([*rng.choice(VOCABULARY, int(n)), *([PHRASE] if own else [])])
        for n, own in zip(lengths, says, strict=True)
    ]
    feature = lengths if pays == "length" else says.astype(np.float64)
    truth = (np.exp(2.2 + 0.18) + 1, np.exp(2.2 + 0.18) * np.sqrt(np.exp(0.36) - 1)) if pays == "length" else (
        0.2, 0.4)  # fmt: skip
    scores = np.sqrt(share) * (feature - truth[0]) / truth[1] + np.sqrt(1 - share) * rng.normal(size=size)
    if pays == "verifier":
        scores = (np.where(rng.random(size) < share, feature, rng.random(size) < 0.05) - 0.05) / np.sqrt(0.05 * 0.95)
    ids = [[int(i) for i in rng.integers(0, 50, int(n))] for n in lengths]
    entropies = lengths * rng.lognormal(0, 0.5, size)
    return Batch(["w1 w2 w3 w4 w5"] * size, texts, ids, [0] * size, lengths, scores.astype(np.float64),
                 rng.lognormal(0, 0.5, size), entropies, rng.normal(0, 0.1, size))  # fmt: skip


def monitors(pays: str, share: float, batch: int, size: int, updates: int, runs: int, seed: int = 0) -> Counter[str]:
    """Return in how many of `runs` each alarm was raised, and any."""
    rng, found = np.random.default_rng([seed, batch, size, updates]), Counter[str]()
    for _ in range(runs):
        limits = Limits.of(drawn(rng, size, share, pays), RATE, updates, range(50))
        names = {alarm.name for _ in range(updates) for alarm in limits.judge(drawn(rng, batch, share, pays), 0.1)[1]}
        found.update(names | ({"any"} if names else set()))
    return found


SIZES = ((16, 64, 20), (16, 512, 200), (32, 256, 100), (128, 256, 60), (512, 64, 60), (512, 512, 60))
"""Batch, SFT's responses and updates."""
SHARES = (0.0, 0.5, 0.7, 0.9, 1.0)
PAYS = ("length", "phrase", "verifier")


def _features(cell: tuple[str, tuple[int, int, int], int]) -> tuple[str, tuple[int, int, int], dict[float, int]]:
    kind, sizes, runs = cell
    return kind, sizes, {share: features(kind, share, *sizes, runs) for share in SHARES}


def _monitors(cell: tuple[str, tuple[int, int, int], int]) -> tuple[str, tuple[int, int, int], dict[float, object]]:
    pays, sizes, runs = cell
    return pays, sizes, {share: dict(monitors(pays, share, *sizes, runs)) for share in (0.5, 0.9, 1.0)}


def main() -> None:
    """Print a line for each kind and size, with the number of runs that raised a false alarm by r²."""
    options = argument_parser(__doc__)
    options.add_argument("--runs", type=int, default=1000, help="of each kind, size and r², for features")
    options.add_argument("--judged", type=int, default=40, help="the same for all monitors, which take longer")
    options.add_argument("--jobs", type=int, default=1)
    given = options.parse_args()
    total, most = 0, 0
    with Pool(given.jobs) as pool:
        for kind, sizes, counts in pool.imap(_features, itertools.product(KINDS, SIZES, [given.runs])):
            print(f"features: {kind}, {sizes}: {counts} of {given.runs}", flush=True)
            total, most = total + sum(counts.values()), max(most, *counts.values())
        allowed = int(stats.binom.isf(0.01 / len(KINDS) / len(SIZES) / len(SHARES), given.runs, RATE))
        print(f"features: {total} in all, at most {most} of {given.runs}; at 1 % chance allows {allowed}")
        for pays, sizes, found in pool.imap(_monitors, itertools.product(PAYS, SIZES, [given.judged])):
            print(f"monitors: score pays for {pays}, {sizes}: {found} of {given.judged}", flush=True)


if __name__ == "__main__":
    main()
