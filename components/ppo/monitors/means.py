"""Monitors of a batch as a whole: its entropy, its diversity, and what its KL buys.

Each compares an estimate of the batch with one of SFT's responses, both with their standard error, by one-sided bounds
of Student's t. So their rates hold as far as a mean over a batch is normal, as `length_score`'s do; the monitors of
events are exact.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from components.ppo.monitors.measures import Batch, shared
from components.ppo.monitors.texture import distinct_ngrams, ngrams, words
from components.stats.intervals import FloatArray

LEAST = 8
"""Responses below which a standard error says too little."""


class Estimate(NamedTuple):
    """A number of a batch."""

    value: float
    error: float
    """Its standard error."""
    freedom: int
    """Degrees of freedom of that."""

    def low(self, level: float) -> float:
        """The lower bound, one-sided at `level`."""
        return self.value - float(stats.t.isf(level, self.freedom)) * self.error

    def high(self, level: float) -> float:
        """The upper bound, one-sided at `level`."""
        return self.value + float(stats.t.isf(level, self.freedom)) * self.error

    def limit(self, bound: float, level: float) -> float:
        """Below which value, with this error, the upper bound lies below `bound`."""
        return bound - float(stats.t.isf(level, self.freedom)) * self.error


def mean(values: FloatArray) -> Estimate:
    """The mean of `values` (B,)."""
    size = len(values)
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(size), size - 1)


def entropy(batch: Batch) -> Estimate:
    """Mean entropy of the policy at a token, nats: a ratio of sums over responses, linearised (Cochran 1977, 6.12)."""
    ratio = float(batch.entropies.sum() / batch.lengths.sum())
    found = mean((batch.entropies - ratio * batch.lengths) / batch.lengths.mean())
    return Estimate(ratio, found.error, found.freedom)


def distinct(texts: Sequence[str]) -> Estimate:
    """Log of distinct 4-grams over all 4-grams of `texts` (B,), by the jackknife, whose variance errs upwards.

    (Efron and Stein 1981, Annals of Statistics 9:586.) It falls as B grows: compare equal numbers of texts only.
    """
    size = len(texts)
    found = distinct_ngrams(texts, range(size))
    without = np.log(np.where(np.isnan(found.without), found.value, found.without))
    variance = (size - 1) / size * float(((without - without.mean()) ** 2).sum())
    return Estimate(math.log(found.value), math.sqrt(variance), size - 1)


def distinct_of_parts(texts: Sequence[str], size: int) -> Estimate:
    """The mean of `distinct` over as many parts of `size` of the `texts` as there are."""
    parts = [distinct(texts[start : start + size]) for start in range(0, len(texts) - size + 1, size)]
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Estimate(sum(part.value for part in parts) / len(parts), error, len(parts) * (size - 1))


def worth(batch: Batch, beta: float) -> Estimate:
    """Mean score less β KL, what PPO maximises, SFT deviations."""
    return mean(batch.scores - beta * batch.kl)


def most_alike(texts: Sequence[str]) -> int:
    """The text whose 4-grams stand in most of the others, on average."""
    held = shared(texts)
    means = [
        float(np.mean([held[gram] for gram in grams])) if (grams := set(ngrams(words(text), 4))) else 0.0
        for text in texts
    ]
    return int(np.argmax(means))
