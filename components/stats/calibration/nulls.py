"""Simulate the ECE and slope that a perfectly calibrated model would show (their nulls). Needs numpy and scipy only.

The pairs of one ranking are judged together: if a is above b and b above c, a is above c. Their outcomes are drawn
together, as a ranking of the Plackett-Luce model: response i gets the utility d_i + G_i with standard Gumbel noise G_i
of its own, and the larger utility wins. Response i then beats j with probability sigmoid(d_i - d_j), which is the
Bradley-Terry model and what a calibrated model claims. For three or more responses no other distribution of independent
noise gives this (Luce 1959; Plackett 1975, J. R. Stat. Soc. C 24:193; Yellott 1977, J. Math. Psychol. 15:109).
Drawing outcomes from the model's own confidences is consistency resampling (Broecker and Smith 2007, Weather and
Forecasting 22:651).

How pairs depend on each other that share a prompt but were judged separately is unknown. For them the null is the
larger of two: the simulated one, and one from the spread of the residuals between prompts alone (`clustered_null`).
"""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit
from scipy.stats import chi2, rankdata

from components.stats.calibration.slope import slope_where
from components.stats.intervals import LEVEL, FloatArray, cluster_codes, t_quantile

_CHUNK_CELLS = 2_000_000

Integers = NDArray[np.int64]


class Judgements(NamedTuple):
    """Which of n test pairs were judged together."""

    prompts: Integers
    """(n,) codes of the prompts, 0 to C - 1."""
    together: Integers
    """(n,) codes: the pairs of one ranking share a code; every other pair has its own."""
    responses: Integers
    """(2, n) codes of the chosen and the rejected responses. A ranked response has the same code in all its pairs."""

    @classmethod
    def alone(cls, prompts: Integers) -> Self:
        """Return judgements in which each pair was judged by itself; `prompts` (n,) are codes."""
        numbers = np.arange(prompts.size)
        return cls(prompts, numbers, np.stack([numbers, numbers + prompts.size]))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], prompts: Sequence[Hashable]) -> Self:
        """Return the judgements of rows of `pairs.<split>`: pairs of one ranking come from the same source row."""
        units = [(prompts[i], row.get("source"), row.get("row", -i)) for i, row in enumerate(rows)]
        texts = (
            hashlib.blake2b(str(row[side]).encode(), digest_size=8).digest()  # the texts themselves could fill memory
            for side in ("chosen", "rejected")
            for row in rows
        )
        responses = cluster_codes(zip(units * 2, texts, strict=True)).reshape(2, -1)
        return cls(cluster_codes(prompts), cluster_codes(units), responses)

    def inside(self, some: NDArray[np.bool_]) -> Self:
        """Return the judgements of the pairs selected by the mask `some` (n,)."""
        prompts, together = cluster_codes(self.prompts[some].tolist()), cluster_codes(self.together[some].tolist())
        responses = cluster_codes(self.responses[:, some].ravel().tolist()).reshape(2, -1)
        return type(self)(prompts, together, responses)

    @property
    def unknown_dependence(self) -> bool:
        """Return whether some prompt has several pairs that were judged separately."""
        return len({*zip(self.prompts.tolist(), self.together.tolist(), strict=True)}) > int(self.prompts.max()) + 1


class Nulls(NamedTuple):
    """ECE of S slices (groups of pairs) in `draws` simulations in which the confidences are true."""

    simulated: FloatArray
    """(draws, S)."""
    clustered: FloatArray | None
    """(draws, S), NaN for slices of one prompt; None where every dependence is known."""
    wrong: FloatArray
    """(draws,) the sum of |d| over the pairs on which the model is wrong."""

    def quantile(self, level: float) -> FloatArray:
        """Return the larger of the two nulls' quantiles, (S,); NaN where one is unknown."""
        return np.max([np.quantile(null, level, axis=0) for null in self._nulls()], axis=0)

    def joint_quantile(self, gated: Sequence[bool]) -> FloatArray:
        """As `quantile`, but by `joint_quantiles` over the slices that are `gated`."""
        return np.max([joint_quantiles(null[:, gated]) for null in self._nulls()], axis=0)

    def _nulls(self) -> list[FloatArray]:
        return [self.simulated] if self.clustered is None else [self.simulated, self.clustered]


def ece_nulls(
    logits: FloatArray, judgements: Judgements, cells: csr_array, sizes: Integers, seed: int, draws: int
) -> Nulls:
    """Simulate the ECE of S slices, which may share pairs. Each draw simulates the outcomes once for all slices.

    ECE's null is not 0: each bin's accuracy deviates by chance, and ECE sums the absolute deviations.

    Args:
        logits: (n,) the chosen's score less the rejected's, after temperature.
        cells: (S * bins, n) whether a pair is in a bin of a slice.
        sizes: (S,) the number of pairs in each slice.
    """
    confidence, distance = expit(np.abs(logits))[:, None], np.abs(logits)
    errors, wrong = [], []
    for right in drawn_correctness(logits, judgements, np.random.default_rng([seed, 0x511CE]), draws):
        gaps = np.abs(cells @ (confidence - right))
        errors.append(gaps.reshape(sizes.size, -1, gaps.shape[1]).sum(axis=1))
        wrong.append(distance @ (1 - right))
    clustered = None
    if judgements.unknown_dependence:
        clustered = clustered_null(logits, judgements.prompts, cells, sizes, seed, draws)
    return Nulls(np.concatenate(errors, axis=1).T / sizes, clustered, np.concatenate(wrong))


def cells_of(members: Sequence[NDArray[np.bool_]], bins_of: Sequence[Integers], bins: int) -> csr_array:
    """Return (S * bins, n): whether a pair is in a bin of a slice. Takes each slice's mask (n,) and its pairs' bins."""
    rows = np.concatenate([index * bins + bin_of for index, bin_of in enumerate(bins_of)])
    columns = np.concatenate([np.flatnonzero(inside) for inside in members])
    return csr_array((np.ones(rows.size), (rows, columns)), shape=(len(members) * bins, members[0].size))


def drawn_correctness(
    logits: FloatArray, judgements: Judgements, rng: np.random.Generator, draws: int
) -> Iterator[FloatArray]:
    """Draw the model's correctness on n pairs from the Plackett-Luce model, `draws` times; yields (n, k) at a time.

    1 where the response that the model prefers wins; a tied score stays 1/2.
    """
    ranked = np.bincount(judgements.together)[judgements.together] > 1
    confidence, side = expit(np.abs(logits))[:, None], np.sign(logits[ranked])[:, None]
    names, responses = np.unique(judgements.responses[:, ranked], return_inverse=True)
    chosen, rejected = responses.reshape(2, -1)
    step = max(1, _CHUNK_CELLS // logits.size)
    for begin in range(0, draws, step):
        size = min(step, draws - begin)
        right = np.empty((logits.size, size))
        right[~ranked] = rng.random((int((~ranked).sum()), size)) < confidence[~ranked]  # needs no utilities
        noise = rng.gumbel(size=(names.size, size))
        right[ranked] = np.abs(logits[ranked])[:, None] + side * (noise[chosen] - noise[rejected]) > 0
        right[logits == 0] = 0.5
        yield right


def clustered_null(
    logits: FloatArray, prompts: Integers, cells: csr_array, sizes: Integers, seed: int, draws: int
) -> FloatArray:
    """Draw ECE (draws, S) where pairs of one prompt depend on each other in an unknown way.

    The residuals confidence - correctness, minus their mean in the bin, are summed by prompt and bin. Their covariance
    over the C prompts of a slice is the sandwich estimate (Liang and Zeger 1986, Biometrika 73:13) times C / (C - 1).
    The bins' gaps are drawn from a multivariate t with that covariance and C - 1 degrees of freedom. This extends the
    interval of `clustered_mean` to all bins at once. NaN for a slice of one prompt. Arguments as for `ece_nulls`.
    """
    residual = expit(np.abs(logits)) - (np.sign(logits) + 1) / 2
    of_prompt = csr_array((np.ones(prompts.size), (np.arange(prompts.size), prompts)))
    members = (cells @ of_prompt).toarray()
    gaps = cells @ residual / np.maximum(members.sum(axis=1), 1)
    sums = (cells.multiply(residual).tocsr() @ of_prompt).toarray() - members * gaps[:, None]
    present = (members.reshape(sizes.size, -1, members.shape[1]).sum(axis=1) > 0).sum(axis=1)
    rng = np.random.default_rng([seed, 0xC1])
    errors = []
    step = max(1, _CHUNK_CELLS // sums.shape[1])
    for begin in range(0, draws, step):
        size = min(step, draws - begin)
        gap = np.abs(sums @ rng.normal(size=(sums.shape[1], size))).reshape(sizes.size, -1, size).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            degrees = (present - 1)[:, None]
            spread = np.sqrt(chi2.ppf(rng.random(size), degrees) / degrees)  # same quantile for all slices of a draw
            errors.append(gap * np.sqrt(present / (present - 1))[:, None] / spread)
    return np.concatenate(errors, axis=1).T / sizes


def joint_quantiles(null: FloatArray) -> FloatArray:
    """Return a threshold for each column of `null` (draws, S) such that 95 % of draws exceed no threshold: (S,).

    All thresholds are quantiles at the same level. Slices share pairs, so Bonferroni's correction would be too
    conservative (single-step min-p, Westfall and Young 1993; balanced as in Beran 1988, JASA 83:679).
    """
    worst = rankdata(null, method="max", axis=0).max(axis=1) / len(null)
    return np.quantile(null, min(1.0, float(np.quantile(worst, 0.95))), axis=0, method="higher")


def slope_null(
    logits: FloatArray, judgements: Judgements, wrong: FloatArray
) -> tuple[float, float] | tuple[None, None]:
    """Return the ends of the interval that contains 95 % of the slopes of a model whose confidences are true.

    The slope depends on the outcomes only through W, the sum of |d| over the wrong pairs (`slope_where`). So the ends
    are the slopes at the quantiles of W over the draws `wrong` (see `Nulls`). Where a prompt has pairs that were judged
    separately, a second interval is W's expectation -+ t_{C-1} times its clustered standard error, and the wider of the
    two is returned. None where every logit is 0, or where there is one prompt and its pairs were judged separately.
    """
    size = np.abs(logits)
    if not size.any():
        return None, None
    high, low = (float(end) for end in np.quantile(wrong, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    if judgements.unknown_dependence:
        count = int(judgements.prompts.max()) + 1
        if count < 2:
            return None, None
        fitted = slope_where(size, float(size[logits < 0].sum()))
        parts_of = np.bincount(judgements.prompts, weights=size * ((logits < 0) - expit(-fitted * size)))
        half = t_quantile(LEVEL, count) * np.sqrt(count / (count - 1) * np.square(parts_of).sum())
        expected = float((size * expit(-size)).sum())
        low, high = max(low, expected + half), min(high, expected - half)
    return slope_where(size, low), slope_where(size, high)
