"""Near-duplicates by MinHash (Broder 1997) and banding (Leskovec, Rajaraman and Ullman, section 3.4)."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming
from components.data.words import folded, words_of

PERMUTATIONS = 64
_SEED = 7
_FOUND = 0.95
"""Minimum probability that two texts of exactly the wanted similarity share a band."""

AT_ONCE = 16_384
"""Number of texts whose signatures are in memory at once."""

Signatures = NDArray[np.uint32]
"""(n, PERMUTATIONS)"""


def runs_of_words(text: str, words: int) -> list[str]:
    """Return the runs of `words` words of a text (`words_of`; characters in scripts without spaces); a shorter text is
    one run."""
    split = words_of(folded(text))
    shifted = [split[i:] for i in range(words)]
    return list(map(" ".join, zip(*shifted, strict=False))) or [" ".join(split)]


def signatures(sets: Sequence[list[str]]) -> Signatures:
    """Return the MinHash signatures of sets, for example of the word runs of texts."""
    from rensa import RMinHash

    if not sets:
        return np.empty((0, PERMUTATIONS), np.uint32)
    rows = RMinHash.digest_matrix_from_token_sets(sets, num_perm=PERMUTATIONS, seed=_SEED).to_rows()
    return np.array(rows, np.uint32)


class Sketches:
    """Signatures (n, PERMUTATIONS) in a file, 256 bytes for each text; only the requested ones are read."""

    def __init__(self, path: Path) -> None:
        """Create `path`, replacing an existing file."""
        self.path, self._texts = path, 0
        with naming(path):
            path.write_bytes(b"")

    def append(self, more: Signatures) -> None:
        """Append the signatures of more texts."""
        with naming(self.path), self.path.open("ab") as out:
            out.write(more.tobytes())  # `tofile` raises errors without a number
        self._texts += len(more)

    def __len__(self) -> int:
        return self._texts

    def __getitem__(self, places: NDArray[np.int64]) -> Signatures:
        """Return the signatures at these places (m,), as (m, PERMUTATIONS)."""
        if not len(places):
            return np.empty((0, PERMUTATIONS), np.uint32)
        with naming(self.path):  # mapped for this read only: mapped pages count as a process's memory
            return np.memmap(self.path, np.uint32, "r", shape=(self._texts, PERMUTATIONS))[places]


def band_rows(jaccard: float) -> int:
    """Return the number of rows in a band: the largest (so the fewest chance matches) that still finds `jaccard` in 95
    of 100 cases."""
    fitting = [r for r in (16, 8, 4, 2) if 1 - (1 - jaccard**r) ** (PERMUTATIONS // r) >= _FOUND]
    return max(fitting, default=1)


def near_earlier(
    sketches: "Signatures | Sketches", jaccard: float, among: int | None = None, order: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """Return for each text (n,) an earlier text with an estimated similarity of at least `jaccard`, or -1.

    Each text is compared with the first text in each band that they share. Only a part of the signatures is in memory
    at once.

    Args:
        among: only the first `among` texts may be matches.
        order: (n,) positions of the texts' signatures in `sketches`; by default all, in order.
    """
    places = np.arange(len(sketches)) if order is None else order
    earlier = np.full(len(places), -1, np.int64)
    before = np.minimum(np.arange(len(places)), len(places) if among is None else among)
    for band in _bands(sketches, band_rows(jaccard), places):
        other = first_equal(band)
        open_ = np.flatnonzero((other < before) & (earlier < 0))
        for start in range(0, len(open_), AT_ONCE):
            some = open_[start : start + AT_ONCE]
            alike = (sketches[places[some]] == sketches[places[other[some]]]).mean(1) >= jaccard
            earlier[some[alike]] = other[some[alike]]
    return earlier


def first_equal(values: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return for each value (n,) the place of the first value that equals it.

    This holds at most 40 bytes a value, `np.unique` with index and inverse 80.
    """
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.arange(len(values))  # of each run of equal values, as places in `order`
    first[1:][ordered[1:] == ordered[:-1]] = 0
    del ordered
    np.maximum.accumulate(first, out=first)
    out = np.empty_like(order)
    out[order] = order[first]
    return out


def _bands(sketches: "Signatures | Sketches", rows: int, places: NDArray[np.int64]) -> Iterable[NDArray[np.uint64]]:
    """Yield each band of the signatures at `places` (n,) as one hash a text (n,): equal bands have equal hashes, and
    collisions are rare. The next band overwrites the array."""
    odd = np.random.default_rng(_SEED).integers(1, 2**63, rows, np.uint64) * np.uint64(2) + np.uint64(1)
    band = np.empty(len(places), np.uint64)
    for start in range(0, PERMUTATIONS, rows):
        for begin in range(0, len(places), AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            mixed = sketches[places[some]][:, start : start + rows].astype(np.uint64) * odd
            mixed ^= mixed >> np.uint64(29)
            band[some] = (mixed * odd).sum(1, dtype=np.uint64)
        yield band
