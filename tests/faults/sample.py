"""Which fault tests run, and the table of what came of them.

`TETHER_FAULTS_SAMPLE=TEXT` runs one test in `SHARE` of each kind, and at least one. The text seeds the choice and the
moments of the kills; `make faults-sample` gives the commit's id. Without it all tests run, and `TETHER_FAULTS_SEED`
seeds the moments.
"""

import os
import random
from collections import defaultdict
from collections.abc import Iterable

import pytest
from rich.console import Console
from rich.table import Table

SAMPLE = os.environ.get("TETHER_FAULTS_SAMPLE", "")
SEED = SAMPLE or os.environ.get("TETHER_FAULTS_SEED", "0")
SHARE = 8


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
