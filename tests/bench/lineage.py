"""How long a question about lineage takes where MLflow holds 1,000 runs.

    python -m tests.bench.lineage
    python -m tests.bench.lineage --runs 100 --home DIR     # go on with a home that is there

All runs read one data file, 25 share an SFT model, 10 a reward model; each has a policy of its own, which its human
evaluation promoted (`lineage_home.py` writes them). A question is asked as the command asks it, in a process that has
imported what it needs.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from flows.models import lineage, lineage_text
from flows.reports import diff
from tasks.runs.status import list_runs, load_status
from tests.bench.lineage_home import write_home

BAR = 2.0
"""Seconds a question may take."""


def questions(home: Path) -> dict[str, Callable[[], Any]]:
    """What a person may ask, by its command."""
    runs = list_runs(home)
    newest, oldest = runs[0], runs[-1]
    policy = next(stage.digest for stage in load_status(home, oldest).stages if stage.name == "ppo")
    data = str(home.parent / "pairs.jsonl")

    def asked(of: str, downstream: bool = False) -> Callable[[], Any]:
        def ask() -> str:
            with lineage.uncollected():
                return lineage_text.text(lineage.lineage(home, of, downstream))

        return ask

    return {
        "lineage tether-policy@champion": asked("tether-policy@champion"),
        "lineage RUN, the oldest": asked(oldest),
        "lineage ARTIFACT, a policy": asked(policy[:12]),
        "lineage FILE": asked(data),
        "lineage FILE --downstream": asked(data, downstream=True),
        "lineage RUN --downstream": asked(oldest, downstream=True),
        "lineage tether-sft/1 --downstream": asked("tether-sft/1", downstream=True),
        "lineage RUN --html": lambda: lineage_text.page(lineage.lineage(home, newest)),
        "diff RUN RUN": lambda: diff.text(diff.diff(home, oldest, newest)),
    }


class Times(NamedTuple):
    """Seconds that a question took."""

    first: float
    """The first time: MLflow's database is opened, a profile read."""
    then: float
    """Later, the median."""
    processor: float
    """Later, of the processor alone: what it takes on a machine that does nothing else."""


def measure(home: Path, repeats: int = 3) -> dict[str, Times]:
    """Each question's times, the later ones of `repeats`."""
    found = {}
    for name, ask in questions(home).items():
        clocks = []
        for _ in range(1 + repeats):
            wall, processor = time.perf_counter(), time.process_time()
            ask()
            clocks.append((time.perf_counter() - wall, time.process_time() - processor))
        later = [statistics.median(each) for each in zip(*clocks[1:], strict=True)]
        found[name] = Times(clocks[0][0], *later)
    return found


def table(found: Mapping[str, Times]) -> str:
    """The questions with their times, and which is over the bar."""
    rows = [f"{'question':<38}{'first, s':>10}{'then, s':>10}{'processor, s':>14}"]
    for name, took in found.items():
        row = f"{name:<38}{took.first:>10.2f}{took.then:>10.2f}{took.processor:>14.2f}"
        rows.append(row + ("" if took.then <= BAR else "  MISSED"))
    return "\n".join(rows)


def main() -> None:
    """Write the home, or go on with it, and ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--home", type=Path, help="kept, and gone on with where it is there (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home = (options.home or Path(folder) / "home").absolute()
        home.mkdir(parents=True, exist_ok=True)
        write_home(home, options.runs)
        print(table(measure(home)))


if __name__ == "__main__":
    main()
