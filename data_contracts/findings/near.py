"""Near-duplicates by MinHash (Broder 1997) and banding (Leskovec, Rajaraman and Ullman, section 3.4)."""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from components.data.words import words_of

PERMUTATIONS = 64
_SEED = 7
_FOUND = 0.95
"""Least chance that two texts of exactly the wanted similarity share a band."""

Signatures = NDArray[np.uint32]
"""(n, PERMUTATIONS)"""


def runs_of_words(text: str, words: int) -> list[str]:
    """The runs of `words` words of a text (`words_of`: in scripts without spaces, characters); the whole of a shorter
    one."""
    said = words_of(text.casefold())
    shifted = [said[i:] for i in range(words)]
    return [" ".join(run) for run in zip(*shifted, strict=False)] or [" ".join(said)]


def signatures(sets: Sequence[list[str]]) -> Signatures:
    """MinHash signatures of sets, as of the runs of words of texts."""
    from rensa import RMinHash

    if not sets:
        return np.empty((0, PERMUTATIONS), np.uint32)
    rows = RMinHash.digest_matrix_from_token_sets(sets, num_perm=PERMUTATIONS, seed=_SEED).to_rows()
    return np.array(rows, np.uint32)


def band_rows(jaccard: float) -> int:
    """Rows of a band: the longest (so the fewest chance matches) that still finds `jaccard` in 95 of 100 cases."""
    fitting = [r for r in (16, 8, 4, 2) if 1 - (1 - jaccard**r) ** (PERMUTATIONS // r) >= _FOUND]
    return max(fitting, default=1)


def near_earlier(found: Signatures, jaccard: float, among: int | None = None) -> NDArray[np.int64]:
    """For each text an earlier one at least as similar as `jaccard` by their signatures, -1 if none was found; (n,).

    Each text is compared with the first of those that it shares a band with.

    Args:
        among: look for it among so many first texts only.
    """
    earlier = np.full(len(found), -1, np.int64)
    before = np.minimum(np.arange(len(found)), len(found) if among is None else among)
    for band in _bands(found, band_rows(jaccard)):
        _, first, group = np.unique(band, return_index=True, return_inverse=True)
        other = first[group]
        open_ = np.flatnonzero((other < before) & (earlier < 0))
        alike = (found[open_] == found[other[open_]]).mean(1) >= jaccard
        earlier[open_[alike]] = other[open_[alike]]
    return earlier


def _bands(found: Signatures, rows: int) -> Iterable[NDArray[np.uint64]]:
    """Each band of the signatures as one number a text; equal bands are equal, others hardly ever."""
    odd = np.random.default_rng(_SEED).integers(1, 2**63, rows, np.uint64) * np.uint64(2) + np.uint64(1)
    for start in range(0, PERMUTATIONS, rows):
        mixed = found[:, start : start + rows].astype(np.uint64) * odd
        mixed ^= mixed >> np.uint64(29)
        yield (mixed * odd).sum(1, dtype=np.uint64)
