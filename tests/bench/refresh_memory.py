"""Measure the memory of choosing a refresh's pairs: `python -m tests.bench.refresh_memory PAIRS`.

Each of the two runs has PAIRS pairs of 1 KB. Prints the process's own memory after the choice, in MiB, without the
pages of mapped files.
"""

import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.data.splits import SPLITS
from components.data.tables.published import read_split
from components.reward.config import RefreshConfig
from components.reward.refresh import compare
from tests.splits import write_split

WORDS = [f"word{number}" for number in range(5000)]


def pairs(run: str, split: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield pairs of 180 random words."""
    rng = random.Random(f"{run} {split}")
    known = dict.fromkeys(("category", "margin", "objectives", "soft_label", "votes", "votes_chosen"))
    for number in range(1, count + 1):
        asked, chosen, rejected = (" ".join(rng.choices(WORDS, k=60)) for _ in range(3))
        prompt = [{"role": "user", "content": f"{run} {split} {number} {asked}"}]
        yield known | {"prompt": prompt, "chosen": chosen, "rejected": rejected, "weight": 1.0, "row": number}


def main() -> None:
    """Write the pairs of both runs, choose, and print."""
    count = int(sys.argv[1])
    compare.check_previous = lambda *given: None  # there is no model here
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run in ("old", "new"):
            for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
                write_split(folder / run / f"pairs.{split}", pairs(run, split, int(count * share)))
        inputs = {"sft": folder, "previous_reward": folder / "none", "previous_data": folder / "old"}
        job: Any = SimpleNamespace(reward=None, seed=0)
        new = {split: read_split(folder / "new" / f"pairs.{split}") for split in SPLITS}
        found = compare.Refresh.begin(job, RefreshConfig(from_run="any", replay=0.5), inputs, new)
        status = Path("/proc/self/status").read_text()
        own = next(int(line.split()[1]) >> 10 for line in status.splitlines() if line.startswith("RssAnon"))
        print(f"{count} pairs in each run, {len(found.splits['train'])} to train on: {own} MiB")


if __name__ == "__main__":
    main()
