"""Measures of responses as texts: repetition within a response, of the prompt, and between responses. Uses no model.

A text's words are runs of word characters and single punctuation marks, in lower case. A text shorter than n words
counts as one n-gram, so that a policy that answers "Yes." to everything is noticed.
"""

import re
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse

from components.stats.intervals import FloatArray, cluster_codes


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def ngrams(tokens: Sequence[str], n: int) -> list[tuple[str, ...]]:
    """Return all n-grams of `tokens`, in order."""
    return list(zip(*(tokens[i:] for i in range(n)), strict=False))


def repetition(text: str, n: int = 4) -> float:
    """Return the share of a text's n-grams that occurred earlier in it (0 if it has none)."""
    grams = ngrams(words(text), n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def echo(prompt: str, response: str, n: int = 4) -> float:
    """Return the share of a response's n-grams that occur in the prompt (0 if it has none)."""
    grams, source = ngrams(words(response), n), set(ngrams(words(prompt), n))
    return sum(gram in source for gram in grams) / len(grams) if grams else 0.0


class LeaveOneOut(NamedTuple):
    """A statistic of all responses, with its values when the responses to one prompt are left out."""

    value: float
    without: FloatArray
    """(C,) without each of the C prompts, in the order of their first appearance."""


def distinct_ngrams(responses: Sequence[str], prompts: Sequence[Hashable], n: int = 4) -> LeaveOneOut:
    """Return distinct-n: distinct n-grams of the N `responses` / all their n-grams (Li et al. 2016, arXiv 1510.03055).

    It falls as N grows: compare it only between equal numbers of responses.

    Raises:
        ValueError: no responses, or a different number of prompts.
    """
    counts, codes = _incidence(responses, prompts, n)
    by_prompt = _summed(counts, codes)
    owners = np.bincount(by_prompt.indices, minlength=by_prompt.shape[1])  # number of prompts with each n-gram
    unique = (by_prompt > 0).astype(np.int64) @ (owners == 1)  # n-grams of this prompt alone
    grams = np.asarray(by_prompt.sum(axis=1)).ravel()
    kinds, total = by_prompt.shape[1], float(grams.sum())
    left = total - grams
    return LeaveOneOut(kinds / total, (kinds - unique) / np.where(left > 0, left, np.nan))


def dissimilarity(responses: Sequence[str], prompts: Sequence[Hashable], n: int = 4) -> LeaveOneOut:
    """Return the mean share of a response's n-grams that a response to another prompt lacks.

    The mean is over all ordered pairs (i, j) of responses to different prompts: the share of i's n-grams that j lacks.
    This is a pairwise form of Self-BLEU (Zhu et al. 2018, arXiv 1802.01886). Self-BLEU compares with all the other
    responses at once and so depends on their number; this does not. 1 if no two responses share an n-gram, 0 if all
    responses are equal.

    Raises:
        ValueError: as for `distinct_ngrams`, or fewer than two prompts.
    """
    counts, codes = _incidence(responses, prompts, n)
    if codes.max() < 1:
        raise ValueError("responses to one prompt cannot be compared with those to another")
    sizes = np.bincount(codes)
    share = _summed(sparse.diags_array(1 / np.asarray(counts.sum(axis=1)).ravel()) @ counts, codes)
    holds = _summed((counts > 0).astype(np.float64), codes)
    shares, holders = (np.asarray(matrix.sum(axis=0)).ravel() for matrix in (share, holds))
    within = np.asarray(share.multiply(holds).sum(axis=1)).ravel()
    as_first, as_second = share @ holders - within, holds @ shares - within  # over pairs with a response to each prompt
    pairs = sizes * (len(codes) - sizes)
    left = pairs.sum() - 2 * pairs
    shared = (as_first.sum() - as_first - as_second) / np.where(left > 0, left, np.nan)
    # Rounded, so that equal responses give exactly 0.
    return LeaveOneOut(round(float(1 - as_first.sum() / pairs.sum()), 12), np.round(1 - shared, 12))


def _incidence(
    responses: Sequence[str], prompts: Sequence[Hashable], n: int
) -> tuple[sparse.csr_array, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return how often each response (rows) contains each n-gram (columns), and each response's prompt as a number."""
    codes = cluster_codes(prompts)
    if not responses or len(codes) != len(responses):
        raise ValueError(f"{len(responses)} responses and {len(codes)} prompts")
    column: dict[tuple[str, ...], int] = {}
    rows, columns = [], []
    for row, text in enumerate(responses):
        ngram_words = words(text)
        for gram in ngrams(ngram_words, n) or [tuple(ngram_words)]:
            rows.append(row)
            columns.append(column.setdefault(gram, len(column)))
    shape = len(responses), len(column)
    return sparse.coo_array((np.ones(len(rows)), (rows, columns)), shape=shape).tocsr(), codes


def _summed(table: sparse.csr_array, codes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> sparse.csr_array:
    """Sum the rows of each prompt."""
    shape = int(codes.max()) + 1, len(codes)
    return (sparse.csr_array((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=shape) @ table).tocsr()
