"""What responses look like as texts: how they repeat themselves, the prompt and each other. No model is asked.

A text's words are runs of word characters and single marks, in lower case. A text shorter than n words counts as one
n-gram, so that a policy that says "Yes." to everything is seen.
"""

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from components.stats.intervals import FloatArray, cluster_codes


def words(text: str) -> list[str]:
    """The words of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """All runs of `n` of `tokens`, in their order."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def repetition(text: str, n: int = 4) -> float:
    """Share of a text's n-grams that stood in it before (0 where it has none)."""
    grams = ngrams(words(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def echo(prompt: str, response: str, n: int = 4) -> float:
    """Share of a response's n-grams that stand in the prompt (0 where it has none)."""
    grams, source = ngrams(words(response), n), set(ngrams(words(prompt), n))
    return sum(gram in source for gram in grams) / len(grams) if grams else 0.0


class LeaveOneOut(NamedTuple):
    """A statistic of all responses, and what it is without the responses to one prompt."""

    value: float
    without: FloatArray
    """(C,) without each of the C prompts, in the order of their first appearance."""


def distinct_ngrams(responses: Sequence[str], prompts: Sequence[Hashable], n: int = 4) -> LeaveOneOut:
    """Distinct n-grams of all N `responses` over all their n-grams, "distinct-n" (Li et al. 2016, arXiv 1510.03055).

    It falls as N grows: compare it between equal numbers of responses only.

    Raises:
        ValueError: no responses, or another number of prompts.
    """
    counts, codes = _incidence(responses, prompts, n)
    by_prompt = _summed(counts, codes)
    owners = np.bincount(by_prompt.indices, minlength=by_prompt.shape[1])  # prompts whose responses hold each n-gram
    own = (by_prompt > 0).astype(np.int64) @ (owners == 1)  # n-grams that go with the prompt
    grams = np.asarray(by_prompt.sum(axis=1)).ravel()
    kinds, total = by_prompt.shape[1], float(grams.sum())
    left = total - grams
    return LeaveOneOut(kinds / total, (kinds - own) / np.where(left > 0, left, np.nan))


def dissimilarity(responses: Sequence[str], prompts: Sequence[Hashable], n: int = 4) -> LeaveOneOut:
    """Chance that an n-gram of one of `responses` does not stand in another one, to another prompt.

    Over all ordered pairs (i, j) of responses to different prompts, the mean share of i's n-grams that j lacks. It is
    the pairwise form of Self-BLEU (Zhu et al. 2018, arXiv 1802.01886), whose references are all the other responses at
    once: so it does not depend on their number. 1 where no two responses share an n-gram, 0 where all are the same.

    Raises:
        ValueError: as `distinct_ngrams`, or fewer than two prompts.
    """
    counts, codes = _incidence(responses, prompts, n)
    if codes.max() < 1:
        raise ValueError("responses to one prompt cannot be compared with those to another")
    sizes = np.bincount(codes)
    share = _summed(sparse.diags_array(1 / np.asarray(counts.sum(axis=1)).ravel()) @ counts, codes)
    holds = _summed((counts > 0).astype(np.float64), codes)
    shares, holders = (np.asarray(each.sum(axis=0)).ravel() for each in (share, holds))
    within = np.asarray(share.multiply(holds).sum(axis=1)).ravel()
    as_first, as_second = share @ holders - within, holds @ shares - within  # of pairs with a response to the prompt
    pairs = sizes * (len(codes) - sizes)
    left = pairs.sum() - 2 * pairs
    shared = (as_first.sum() - as_first - as_second) / np.where(left > 0, left, np.nan)
    # Rounded, so that 0 is 0 where all responses are the same.
    return LeaveOneOut(round(float(1 - as_first.sum() / pairs.sum()), 12), np.round(1 - shared, 12))


def _incidence(
    responses: Sequence[str], prompts: Sequence[Hashable], n: int
) -> tuple[sparse.csr_array, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """How often each n-gram (columns) stands in each response (rows), and each response's prompt as a number."""
    codes = cluster_codes(prompts)
    if not responses or len(codes) != len(responses):
        raise ValueError(f"{len(responses)} responses and {len(codes)} prompts")
    column: dict[tuple[str, ...], int] = {}
    rows, columns = [], []
    for row, text in enumerate(responses):
        found = words(text)
        for gram in ngrams(found, n) or [tuple(found)]:
            rows.append(row)
            columns.append(column.setdefault(gram, len(column)))
    shape = len(responses), len(column)
    return sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=shape).tocsr(), codes


def _summed(table: sparse.csr_array, codes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> sparse.csr_array:
    """The rows of one prompt added up."""
    shape = int(codes.max()) + 1, len(codes)
    return (sparse.csr_array((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=shape) @ table).tocsr()
