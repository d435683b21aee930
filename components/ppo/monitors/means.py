"""Monitors of a batch as a whole: its entropy, its diversity, and its score per KL.

Each compares an estimate from the batch with one from SFT's responses, both with standard errors, by one-sided bounds
of Student's t. So their false-alarm rates assume that a batch's mean is normal. The monitors of events are exact.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from components.ppo.monitors.measures import Batch, shared
from components.ppo.monitors.text_statistics import distinct_ngrams, ngrams, words
from components.stats.intervals import FloatArray

LEAST = 8
"""The fewest responses for a usable standard error."""


class Estimate(NamedTuple):
    """An estimate from a batch."""

    value: float
    error: float
    """The standard error."""
    freedom: int
    """Degrees of freedom of the standard error."""

    def low(self, level: float) -> float:
        """Return the lower bound, one-sided at `level`."""
        return self.value - float(stats.t.isf(level, self.freedom)) * self.error

    def high(self, level: float) -> float:
        """Return the upper bound, one-sided at `level`."""
        return self.value + float(stats.t.isf(level, self.freedom)) * self.error

    def limit(self, bound: float, level: float) -> float:
        """Return the value below which an estimate with this error has its upper bound below `bound`."""
        return bound - float(stats.t.isf(level, self.freedom)) * self.error


def mean(values: FloatArray) -> Estimate:
    """Estimate the mean of `values` (B,)."""
    size = len(values)
    return Estimate(float(values.mean()), float(values.std(ddof=1)) / math.sqrt(size), size - 1)


def entropy(batch: Batch) -> Estimate:
    """Estimate the policy's mean entropy per token, nats: a ratio of sums, linearised (Cochran 1977, section 6.4)."""
    ratio = float(batch.entropies.sum() / batch.lengths.sum())
    estimate = mean((batch.entropies - ratio * batch.lengths) / batch.lengths.mean())
    return Estimate(ratio, estimate.error, estimate.freedom)


def distinct(texts: Sequence[str]) -> Estimate:
    """Estimate log(distinct 4-grams / all 4-grams) of `texts` (B,) by the jackknife.

    The jackknife's variance is biased upwards (Efron and Stein 1981, Annals of Statistics 9:586). The value falls as B
    grows: compare it only between equal numbers of texts.
    """
    size = len(texts)
    estimate = distinct_ngrams(texts, range(size))
    without = np.log(np.where(np.isnan(estimate.without), estimate.value, estimate.without))
    variance = (size - 1) / size * float(((without - without.mean()) ** 2).sum())
    return Estimate(math.log(estimate.value), math.sqrt(variance), size - 1)


def distinct_of_parts(texts: Sequence[str], size: int) -> Estimate:
    """Split `texts` into as many parts of `size` as possible; return the mean of `distinct` over the parts."""
    parts = [distinct(texts[start : start + size]) for start in range(0, len(texts) - size + 1, size)]
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Estimate(sum(part.value for part in parts) / len(parts), error, len(parts) * (size - 1))


def worth(batch: Batch, beta: float) -> Estimate:
    """Estimate the mean of score - β KL, which PPO maximises, in SFT deviations."""
    return mean(batch.scores - beta * batch.kl)


def most_alike(texts: Sequence[str]) -> int:
    """Return the index of the text whose 4-grams occur in the most other texts, on average."""
    counter = shared(texts)
    means = [
        float(np.mean([counter[gram] for gram in grams])) if (grams := set(ngrams(words(text), 4))) else 0.0
        for text in texts
    ]
    return int(np.argmax(means))
