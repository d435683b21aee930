"""Which fault tests and which files of slow tests run, and the table of what came of the faults.

`TETHER_FAULTS_SAMPLE=TEXT` runs one fault test in `SHARE` of each kind, and at least one. The text seeds the choice and
the moments of the kills; `make faults-sample` gives the commit's id. Without it all tests run, and `TETHER_FAULTS_SEED`
seeds the moments. `TETHER_CORE_SAMPLE=TEXT` runs the tests of every second file of each folder of tests;
`make core-sample` gives the commit's id.
"""

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

SAMPLE = os.environ.get("TETHER_FAULTS_SAMPLE", "")
SEED = SAMPLE or os.environ.get("TETHER_FAULTS_SEED", "0")
SHARE = 8
CORE = os.environ.get("TETHER_CORE_SAMPLE", "")
TESTS = Path(__file__).resolve().parent.parent


def chosen(items: Iterable[pytest.Item], seed: str) -> set[pytest.Item]:
    """The fault tests of a sample: some of each `kind`, and all that have none."""
    kinds: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("kind")
        kinds[mark.args[0] if mark else item.nodeid].append(item)
    # Each kind draws by itself, so that one more test of a kind leaves the choice of the others as it is.
    return {
        item
        for kind, found in kinds.items()
        for item in random.Random(f"{seed} {kind}").sample(found, -(-len(found) // SHARE))
    }


def half_of_the_files(items: Sequence[pytest.Item], seed: str) -> set[pytest.Item]:
    """The tests of half of the files, rounded up, of each folder in tests/ and of the files beside these folders.

    A file's tests stay together, since they share what they set up.
    """
    folders: dict[str, set[Path]] = defaultdict(set)
    for item in items:
        first, *rest = item.path.relative_to(TESTS).parts
        folders[first if rest else ""].add(item.path)
    drawn = {
        path
        for folder, paths in folders.items()
        for path in random.Random(f"{seed} {folder}").sample(sorted(paths), -(-len(paths) // 2))
    }
    return {item for item in items if item.path in drawn}


def table(reports: Iterable[pytest.TestReport]) -> Table | None:
    """What the tests that passed recorded as their `outcome`; None where no test did."""
    rows = [value for report in reports for name, value in report.user_properties if name == "outcome"]
    found = Table("kind", "where", "outcome", "seconds to the end")
    for row in sorted(rows):
        found.add_row(*row)
    return found if rows else None


def show(reports: Iterable[pytest.TestReport]) -> None:
    """Print the table."""
    if (found := table(reports)) is not None:
        print()
        Console(width=150).print(found)
