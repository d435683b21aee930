"""What share of the reward model's training goes to a source with a weight, by what a step's loss is divided by.

    python -m tests.bench.source_shares [HARMLESS.jsonl.gz HELPFUL.jsonl.gz]

A step's loss is Σ w s l / Σ w (weight w in the ranking, source's weight s, loss l). With Σ w s as the divisor a batch
of one source would have no weight, and batches are sorted by length. Without files, two sources of lengths that do not
overlap.
"""

import gzip
import json
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from components.models.batching import LengthBuckets

WEIGHT = 3.0
"""The weight of the first source; the second has 1."""


def shares(lengths: NDArray[np.int64], first: int, batch: int) -> tuple[float, float, float]:
    """Return the share of the `first` pairs in the steps' losses, if every pair's loss is the same: as the weight says,
    and with Σ w and Σ w s as the divisor."""
    mine = np.arange(len(lengths)) < first
    s = np.where(mine, WEIGHT, 1.0)
    batches = [np.array(each) for each in LengthBuckets(lengths, batch, random.Random(0))]
    own, every = (np.array([s[each][which[each]].sum() for each in batches]) for which in (mine, mine | True))
    sizes = np.array([len(each) for each in batches])
    return (
        float(s[mine].sum() / s.sum()),
        float((own / sizes).sum() / (every / sizes).sum()),
        float((own / every).mean()),
    )


def main() -> None:
    if len(sys.argv) > 1:
        read = [gzip.decompress(Path(path).read_bytes()).splitlines() for path in sys.argv[1:3]]
        rows = [list(map(json.loads, each)) for each in read]
        lengths = [[max(len(row["chosen"]), len(row["rejected"])) for row in each] for each in rows]
    else:
        drawn = np.random.default_rng(0)
        lengths = [drawn.integers(20, 80, 2000).tolist(), drawn.integers(100, 400, 2000).tolist()]
    for batch in (8, 32):
        said, fixed, cancelled = shares(np.array([*lengths[0], *lengths[1]]), len(lengths[0]), batch)
        print(f"batches of {batch}: by weight {said:.3f}, divisor Σ w {fixed:.3f}, divisor Σ w s {cancelled:.3f}")


if __name__ == "__main__":
    main()
