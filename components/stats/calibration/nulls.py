"""What a model whose confidences are true would be measured at: simulated nulls. numpy and scipy only.

The pairs of one ranking are judged together: if a is above b and b above c, a is above c. Their outcomes are drawn
together, as a ranking of the Plackett-Luce model: response i gets the utility d_i + G_i with standard Gumbel noise G_i
of its own, and the larger utility wins. A single pair is then won with probability sigmoid(d_i - d_j), which is what
Bradley and Terry say and a calibrated model claims, and of all models with independent noise it is the only one for
three responses or more (Luce 1959; Plackett 1975, J. R. Stat. Soc. C 24:193; Yellott 1977, J. Math. Psychol. 15:109).
Drawing confidences that are true is consistency resampling (Broecker and Smith 2007, Weather and Forecasting 22:651).

Of pairs that share a prompt and were judged apart nobody knows how they depend on each other. There the null is the
larger of two: the simulated one, and one that only uses the spread of the residuals between prompts (`clustered_null`).
"""

import hashlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.special import expit
from scipy.stats import chi2, rankdata

from components.stats.calibration.slope import SlopeNull, slope_where
from components.stats.intervals import LEVEL, FloatArray, cluster_codes, t_quantile

_CHUNK_CELLS = 2_000_000

Integers = NDArray[np.int64]


class Judgements(NamedTuple):
    """How n test pairs came to their labels."""

    prompts: Integers
    """(n,) codes of the prompts, 0 to C - 1."""
    together: Integers
    """(n,) codes: the pairs of one ranking share one, all others have one of their own."""
    responses: Integers
    """(2, n) codes of the chosen and the rejected responses: a response of a ranking has one in all its pairs."""

    @classmethod
    def alone(cls, prompts: Integers) -> Self:
        """Each pair judged by itself; `prompts` (n,) are codes."""
        each = np.arange(prompts.size)
        return cls(prompts, each, np.stack([each, each + prompts.size]))

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, object]], prompts: Sequence[Hashable]) -> Self:
        """Those of rows of `pairs.<split>`: the pairs of a ranking have their row's number in common."""
        units = [(prompts[i], row.get("source"), row.get("row", -i)) for i, row in enumerate(rows)]
        texts = (
            hashlib.blake2b(str(row[side]).encode(), digest_size=8).digest()  # where texts would fill memory
            for side in ("chosen", "rejected")
            for row in rows
        )
        responses = cluster_codes(zip(units * 2, texts, strict=True)).reshape(2, -1)
        return cls(cluster_codes(prompts), cluster_codes(units), responses)

    def inside(self, some: NDArray[np.bool_]) -> Self:
        """Of some of the pairs, a mask (n,)."""
        prompts, together = cluster_codes(self.prompts[some].tolist()), cluster_codes(self.together[some].tolist())
        responses = cluster_codes(self.responses[:, some].ravel().tolist()).reshape(2, -1)
        return type(self)(prompts, together, responses)

    @property
    def unknown_dependence(self) -> bool:
        """Whether a prompt has pairs that were judged apart."""
        return len({*zip(self.prompts.tolist(), self.together.tolist(), strict=True)}) > int(self.prompts.max()) + 1


class Nulls(NamedTuple):
    """ECE of S slices in `draws` draws of a truth that agrees with the confidences."""

    simulated: FloatArray
    """(draws, S)."""
    clustered: FloatArray | None
    """(draws, S), NaN for slices of one prompt; None where every dependence is known."""
    wrong: FloatArray
    """(draws,) the sum of |d| over the pairs that the model has wrong."""

    def quantile(self, level: float) -> FloatArray:
        """The larger of both nulls' quantiles, (S,); NaN where one is unknown."""
        return np.max([np.quantile(null, level, axis=0) for null in self._nulls()], axis=0)

    def joint_quantile(self, judged: Sequence[bool]) -> FloatArray:
        """As `quantile`, by `joint_quantiles`, of the slices that are judged."""
        return np.max([joint_quantiles(null[:, judged]) for null in self._nulls()], axis=0)

    def _nulls(self) -> list[FloatArray]:
        return [self.simulated] if self.clustered is None else [self.simulated, self.clustered]


def ece_nulls(
    logits: FloatArray, judgements: Judgements, cells: csr_array, sizes: Integers, seed: int, draws: int
) -> Nulls:
    """ECE of S slices under simulated truths, one truth a draw for all slices, which may share pairs.

    ECE's null is not 0: each bin's mean strays by chance, and ECE adds up its size.

    Args:
        logits: (n,) the chosen's score less the rejected's, after temperature.
        cells: (S * bins, n) which pairs are in which bin of which slice.
        sizes: (S,) pairs of each slice.
    """
    confidence, distance = expit(np.abs(logits))[:, None], np.abs(logits)
    found, wrong = [], []
    for right in drawn_correctness(logits, judgements, np.random.default_rng([seed, 0x511CE]), draws):
        gaps = np.abs(cells @ (confidence - right))
        found.append(gaps.reshape(sizes.size, -1, gaps.shape[1]).sum(axis=1))
        wrong.append(distance @ (1 - right))
    clustered = None
    if judgements.unknown_dependence:
        clustered = clustered_null(logits, judgements.prompts, cells, sizes, seed, draws)
    return Nulls(np.concatenate(found, axis=1).T / sizes, clustered, np.concatenate(wrong))


def cells_of(members: Sequence[NDArray[np.bool_]], bins_of: Sequence[Integers], bins: int) -> csr_array:
    """(S * bins, n) which of n pairs are in which bin of which slice, of masks (n,) and the bins of those inside."""
    rows = np.concatenate([index * bins + bin_of for index, bin_of in enumerate(bins_of)])
    columns = np.concatenate([np.flatnonzero(inside) for inside in members])
    return csr_array((np.ones(rows.size), (rows, columns)), shape=(len(members) * bins, members[0].size))


def drawn_correctness(
    logits: FloatArray, judgements: Judgements, rng: np.random.Generator, draws: int
) -> Iterator[FloatArray]:
    """Correctness of the model on n pairs, `draws` times, drawn by Plackett and Luce: (n, k) at a time.

    1 where the response that the model prefers wins; ties stay a half, as they are counted.
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
    """ECE (draws, S) where pairs of one prompt depend on each other in a way that nobody knows.

    The residuals confidence - correctness, less their mean in the bin, are summed by prompt and bin; their covariance
    over the C prompts of a slice is the sandwich's (Liang and Zeger 1986, Biometrika 73:13), with C / (C - 1), and the
    bins' gaps are drawn from a multivariate t of C - 1 degrees of freedom: `clustered_mean`'s interval, for all bins
    at once. NaN for a slice of one prompt. Arguments as for `ece_nulls`.
    """
    residual = expit(np.abs(logits)) - (np.sign(logits) + 1) / 2
    of_prompt = csr_array((np.ones(prompts.size), (np.arange(prompts.size), prompts)))
    members = (cells @ of_prompt).toarray()
    gaps = cells @ residual / np.maximum(members.sum(axis=1), 1)
    sums = (cells.multiply(residual).tocsr() @ of_prompt).toarray() - members * gaps[:, None]
    present = (members.reshape(sizes.size, -1, members.shape[1]).sum(axis=1) > 0).sum(axis=1)
    rng = np.random.default_rng([seed, 0xC1])
    found = []
    step = max(1, _CHUNK_CELLS // sums.shape[1])
    for begin in range(0, draws, step):
        size = min(step, draws - begin)
        gap = np.abs(sums @ rng.normal(size=(sums.shape[1], size))).reshape(sizes.size, -1, size).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            degrees = (present - 1)[:, None]
            spread = np.sqrt(chi2.ppf(rng.random(size), degrees) / degrees)  # one quantile for all slices of a draw
            found.append(gap * np.sqrt(present / (present - 1))[:, None] / spread)
    return np.concatenate(found, axis=1).T / sizes


def joint_quantiles(null: FloatArray) -> FloatArray:
    """For each column of `null` (draws, S) the value that it exceeds as rarely as any other column exceeds its own,
    such that 95 % of draws exceed none: (S,). Slices share pairs, so Bonferroni's correction would be too large
    (single-step min-p, Westfall and Young 1993; balanced as Beran 1988, JASA 83:679)."""
    worst = rankdata(null, method="max", axis=0).max(axis=1) / len(null)
    return np.quantile(null, min(1.0, float(np.quantile(worst, 0.95))), axis=0, method="higher")


def slope_null(logits: FloatArray, judgements: Judgements, wrong: FloatArray) -> SlopeNull:
    """Ends of the interval in which 95 % of the slopes of a model lie whose confidences are true.

    The slope depends on the outcomes by one number alone, the sum W of |d| over the wrong pairs (`slope_where`). So the
    ends are the slopes at W's quantiles: over the draws `wrong` (see `Nulls`), and where a prompt has pairs that were
    judged apart, also W's expectation -+ t_{C-1} times its clustered standard error, the wider of both. Unknown where
    every logit is 0, or one prompt alone has pairs that were judged apart.
    """
    size = np.abs(logits)
    if not size.any():
        return SlopeNull()
    high, low = (float(end) for end in np.quantile(wrong, [(1 - LEVEL) / 2, (1 + LEVEL) / 2]))
    if judgements.unknown_dependence:
        count = int(judgements.prompts.max()) + 1
        if count < 2:
            return SlopeNull()
        fitted = slope_where(size, float(size[logits < 0].sum()))
        parts_of = np.bincount(judgements.prompts, weights=size * ((logits < 0) - expit(-fitted * size)))
        half = t_quantile(LEVEL, count) * np.sqrt(count / (count - 1) * np.square(parts_of).sum())
        expected = float((size * expit(-size)).sum())
        low, high = max(low, expected + half), min(high, expected - half)
    return SlopeNull(slope_where(size, low), slope_where(size, high))
