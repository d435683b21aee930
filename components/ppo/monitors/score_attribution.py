"""How much of what the score has gained over SFT a feature of the responses explains, by analysis of covariance.

With a feature x (0 or 1 for an event, or a number) and the score s of SFT's responses (0) and of a batch (1),

    b = (Sxs_0 + Sxs_1) / (Sxx_0 + Sxx_1)        slope of the score on the feature within the two (Fisher 1932, §49)
    explained = b (mean x_1 - mean x_0)          of the gain mean s_1 - mean s_0

It is the indirect effect of a mediation analysis (MacKinnon 2008, chapter 3): what the score would have gained had only
the feature changed. A reward that pays for one feature alone makes it the whole gain; a policy that answers better and
flatters a little more has a small part of its gain there.

A gain by chance is explained too: where a feature decides the score, both of its means vary together. So what counts
is the chance of such a gain, were the policy SFT. The slope hardly varies then, and the gain is as improbable as the
rise of the feature's mean: Fisher's exact test for an event, for a number a test of ranks beside Welch's (`larger`).

A feature that explains most of the variance of the scores decides how the reward model orders responses. There are few
of them, so they alone share the level of all (Holm's reason, 1979, without the order: which features they are hardly
depends on which responses are SFT's). With r, the correlation of feature and score within the two sets,

    r = (Sxs_0 + Sxs_1) / sqrt((Sxx_0 + Sxx_1) (Sss_0 + Sss_1)),    atanh r ~ Normal(atanh rho, 1 / (N + B - 4))

(Fisher 1921, Metron 1:3), that is so if r² is above `SOLE` for certain.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats
from scipy.special import gammaln

from components.ppo.monitors.text_statistics import ngrams, words
from components.stats.intervals import FloatArray

Gram = tuple[str, ...]
PART = 2 / 3
"""The share of the score's gain from which on a feature explains most of it."""
LEAST = 0.25
"""SFT deviations of score that a feature has to explain: a third of a deviation is gained by learning too."""
SOLE = 1 / 2
"""Share of the variance of scores, within SFT's responses and the batch, above which a feature explains most of it."""


class Sums(NamedTuple):
    """What is needed of a feature in one set of responses."""

    mean: float
    squares: float
    """Sum of (x - mean)²."""
    products: float
    """Sum of (x - mean) (score - its mean)."""
    of_scores: float
    """Sum of (score - its mean)²."""
    size: int
    """Of responses."""
    values: FloatArray
    """Of the feature (B,)."""

    @classmethod
    def of(cls, values: FloatArray, scores: FloatArray) -> "Sums":
        """Of a feature (B,) and the scores (B,) of the same responses."""
        # The mean of equal values is rounded, and a slope on what is left of them would be noise.
        mean = values[0] if values.min() == values.max() else values.mean()
        off, scored = values - mean, scores - scores.mean()
        return cls(float(mean), float(off @ off), float(off @ scored), float(scored @ scored), len(values), values)


def explained(policy: Sums, sft: Sums) -> float:
    """What the score has gained by the feature, SFT deviations; 0 where the feature varies in neither set."""
    squares = policy.squares + sft.squares
    return (policy.products + sft.products) / squares * (policy.mean - sft.mean) if squares > 0 else 0.0


def correlation(policy: Sums, sft: Sums) -> float:
    """Return r of feature and score within the two sets; 0 where it is negative or either does not vary."""
    both = (policy.squares + sft.squares) * (policy.of_scores + sft.of_scores)
    return max((policy.products + sft.products) / math.sqrt(both), 0.0) if both > 0 else 0.0


def is_sole(policy: Sums, sft: Sums, level: float) -> bool:
    """Whether the feature explains more than `SOLE` of the variance of scores, and what it has gained is no chance:
    each for certain at `level`, one-sided."""
    count = policy.size + sft.size
    if count <= 4:
        return False
    z = math.atanh(min(correlation(policy, sft), 1 - 1e-12))  # r = 1 if the score is linear in the feature
    most = z - float(stats.norm.isf(level)) / math.sqrt(count - 4) > math.atanh(math.sqrt(SOLE))
    return most and chance(policy, sft) <= level


def chance(policy: Sums, sft: Sums) -> float:
    """Return the probability of such a rise of the feature's mean, were the policy SFT."""
    if all(np.isin(sums.values, (0, 1)).all() for sums in (policy, sft)):
        return more_often(int(policy.values.sum()), policy.size, int(sft.values.sum()), sft.size)
    return larger(policy.values, sft.values)


def explains_most(gained: float, score: float) -> bool:
    """Whether the part `gained` by a feature is most of what the `score` has gained, and enough to matter."""
    return score > 0 and gained >= LEAST and gained >= PART * score


@functools.lru_cache(maxsize=4096)
def more_often(count: int, size: int, before: int, of: int) -> float:
    """Chance that `count` of `size` responses or more show an event that `before` of SFT's `of` show, were the policy
    SFT: Fisher's exact test (1934), one-sided. (scipy's takes 30 times as long, for one n-gram after the other.)"""
    both = count + before
    counts = np.arange(max(count, both - of), min(both, size) + 1)
    logs = _log_choose(size, counts) + _log_choose(of, both - counts) - _log_choose(size + of, both)
    return float(np.exp(logs).sum())


def _log_choose(n: int, k: Any) -> Any:
    return gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)


def larger(policy: FloatArray, sft: FloatArray) -> float:
    """The same for the mean of a number (B,) and (N,): the larger chance of Welch's test (1947) and a test of ranks.

    Welch's errs at such levels if a few responses decide the mean, as with lengths. Ranks have no such tails: of Mann
    and Whitney's test (1947) the normal approximation is wide enough unless half of all values or more are equal. Then
    it is Fisher's exact test of the values above these, or of at least these if none is above.
    """
    both = np.concatenate([policy, sft])
    middle, size = np.sort(both)[len(both) // 2], len(policy)
    if (both == middle).mean() >= 0.5:
        is_above = both > middle if middle < both.max() else both >= middle
        ranks = more_often(int(is_above[:size].sum()), size, int(is_above[size:].sum()), len(sft))
    else:
        ranks = float(stats.mannwhitneyu(policy, sft, alternative="greater", method="asymptotic").pvalue)
    error, freedom = _welch(policy, sft)
    rise = float(policy.mean() - sft.mean())
    return max(ranks, float(stats.t.sf(rise / error, freedom)) if error else float(rise <= 0))


def larger_from(policy: FloatArray, sft: FloatArray, level: float) -> float:
    """The mean of `policy` from which on Welch's chance is at most `level`, were its spread as it is."""
    error, freedom = _welch(policy, sft)
    return float(sft.mean()) + (error * float(stats.t.isf(level, freedom)) if error else 0.0)


def _welch(policy: FloatArray, sft: FloatArray) -> tuple[float, float]:
    """Return the standard error of the difference of two means, and its degrees of freedom."""
    parts = [float(values.var(ddof=1)) / len(values) for values in (policy, sft)]
    freedom = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (policy, sft), strict=True))
    return math.sqrt(sum(parts)), sum(parts) ** 2 / freedom if freedom else 1.0


class Rows(NamedTuple):
    """In which responses each n-gram stands, and the scores of all."""

    of: Mapping[Gram, tuple[int, ...]]
    scores: FloatArray

    @classmethod
    def find(cls, texts: Sequence[str], scores: FloatArray, n: int = 4) -> "Rows":
        """Of texts (B,) and their scores (B,)."""
        rows_by_gram = defaultdict[Gram, list[int]](list)
        for row, text in enumerate(texts):
            for gram in dict.fromkeys(ngrams(words(text), n)):
                rows_by_gram[gram].append(row)
        return cls({gram: tuple(rows) for gram, rows in rows_by_gram.items()}, scores)


def features_of_the_gain(
    policy: Mapping[str, FloatArray], scores: FloatArray, sft: Mapping[str, FloatArray], sft_scores: FloatArray,
    level: float, sole_level: float,
) -> dict[str, tuple[float, bool]]:  # fmt: skip
    """Return what the score has gained (SFT deviations) by each feature that explains most of it, and whether that is
    certain only because the feature is among the few that explain most of the variance of the scores.

    Args:
        policy: (B,) by feature; `scores` (B,) of the same responses.
        sft: (N,) by feature; `sft_scores` (N,).
        level: of each feature.
        sole_level: of all features that explain most of the variance together.
    """
    gain = float(scores.mean() - sft_scores.mean())
    if gain < LEAST:
        return {}
    sums = {name: (Sums.of(policy[name], scores), Sums.of(sft[name], sft_scores)) for name in sft}
    rivals = sum(correlation(*pair) ** 2 > SOLE for pair in sums.values())
    features = dict[str, tuple[float, bool]]()
    for name, pair in sums.items():
        gained = explained(*pair)
        if explains_most(gained, gain):
            certain = chance(*pair) <= level
            if certain or is_sole(*pair, sole_level / max(rivals, 1)):
                features[name] = gained, not certain
    return features


def gram_of_the_gain(
    policy: Rows, sft: Rows, level: float, sole_level: float | None = None
) -> tuple[float, Gram] | None:
    """Return the largest gain in score that one n-gram explains (SFT deviations), and that n-gram; None if none does.

    An n-gram has to stand in more responses than in SFT's for certain, by Fisher's exact test at `level` for all
    n-grams together, or stand in two responses or more, be among those that explain most of the variance of the scores,
    and be certain at `sole_level` (`level` if None) for all of these together.
    N-grams that stand in the same responses are one test, and those that stand in so few that the test could not reject
    at that level are none (Tarone 1990, Biometrics 46:515): given all the responses, both are known before it is known
    which are SFT's.
    """
    size, of = len(policy.scores), len(sft.scores)
    gain, sole_level = float(policy.scores.mean() - sft.scores.mean()), level if sole_level is None else sole_level
    if gain < LEAST:
        return None
    tests: dict[tuple[tuple[int, ...], tuple[int, ...]], Gram] = {}
    for gram in itertools.chain(policy.of, sft.of):  # those of SFT alone too, or the number would tell which are SFT's
        tests.setdefault((policy.of.get(gram, ()), sft.of.get(gram, ())), gram)
    least = list[float]()
    for rows, before in tests:
        both = len(rows) + len(before)
        least.append(more_often(min(both, size), size, both - min(both, size), of))
    at_most, gains = level / max(_testable(np.sort(least), level), 1), list[tuple[float, Gram]]()
    rare = {test: more_often(len(test[0]), size, len(test[1]), of) for test in tests}
    if min(rare.values(), default=1.0) > max(at_most, sole_level):
        return None
    spread = [float(((scores - scores.mean()) ** 2).sum()) for scores in (policy.scores, sft.scores)]
    sums = {
        (rows, before): (_sums_of_rows(rows, policy.scores, spread[0]), _sums_of_rows(before, sft.scores, spread[1]))
        for rows, before in tests if len(rows) + len(before) > 1
    }  # fmt: skip
    rivals = sum(correlation(*pair) ** 2 > SOLE for pair in sums.values())
    for test, pair in sums.items():
        gained = explained(*pair)
        if explains_most(gained, gain) and (rare[test] <= at_most or is_sole(*pair, sole_level / max(rivals, 1))):
            gains.append((gained, tests[test]))
    return max(gains, default=None)


def _testable(least: FloatArray, level: float) -> int:
    """The smallest k with at most k tests whose smallest reachable chance (sorted) is at most `level` / k."""
    for k in range(1, len(least) + 1):
        if int(np.searchsorted(least, level / k, side="right")) <= k:
            return k
    return len(least)


def _sums_of_rows(rows: Sequence[int], scores: FloatArray, of_scores: float) -> Sums:
    """Of an event that the responses `rows` show; `of_scores` as in `Sums`."""
    size, count = len(scores), len(rows)
    share = count / size
    products = float(scores[list(rows)].sum() - count * scores.mean()) if count else 0.0
    return Sums(share, count * (1 - share), products, of_scores, size, np.isin(np.arange(size), rows).astype(float))
