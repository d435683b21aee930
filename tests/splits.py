"""Splits for tests, as validation publishes them."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from components.data.tables.published import SplitWriter
from data_contracts.examine import Examination
from data_contracts.splits import splits_beside

OF_SINGLE_QUESTIONS = ("votes_helpful", "votes_compliant")


def published(pairs: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Pairs of the support desk's generator without the votes on single questions, which a split has no columns for."""
    for pair in pairs:
        yield {name: value for name, value in pair.items() if name not in OF_SINGLE_QUESTIONS}


def write_splits(found: Examination, artifact: Path) -> dict[str, float]:
    """Write the splits as `splits_beside` and return its metrics."""
    with splits_beside(found, artifact) as sizes:
        return sizes


def write_split(folder: Path, rows: Iterable[Mapping[str, Any]], weighted: bool = False) -> None:
    """Write `rows` as the split `folder`, and replace an existing one. `weighted` and errors are as for
    `SplitWriter`."""
    shutil.rmtree(folder, ignore_errors=True)
    with SplitWriter(folder, weighted) as split:
        for row in rows:
            split.write(row)
