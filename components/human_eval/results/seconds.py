"""How long raters took for an item, if their tool recorded it."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.human_eval.batch.reading import sheet_records

Seconds = Mapping[tuple[str, int], float]
"""Maps item (`q0001`) and rater (from 0) to seconds."""


def seconds_columns(raters: int) -> list[str]:
    """Return the joint sheet's columns `seconds_1` to `seconds_k`, one per rater."""
    return [f"seconds_{rater}" for rater in range(1, raters + 1)]


def read_seconds(files: Iterable[Path], raters: int) -> Seconds:
    """Return the seconds in returned sheets; empty if no file has them.

    They are in the column `seconds` of a rater's own file, or `seconds_1` to `seconds_k` of the joint sheet. Anything
    but a number above 0 counts as not measured.

    Raises:
        UserError: as for `sheet_records`.
    """
    found: dict[tuple[str, int], float] = {}
    for path in files:
        for _, record in sheet_records(path):
            item = record.get("item", "").strip().split("-")[0]
            own = {f"seconds_{_rater(record)}": record["seconds"]} if "seconds" in record else {}
            for rater, column in enumerate(seconds_columns(raters)):
                taken = _positive((record | own).get(column, ""))
                if taken is not None:
                    found[item, rater] = taken
    return found


def as_cells(seconds: Seconds, item: str, raters: int) -> dict[str, str]:
    """Return an item's seconds by column, rounded to tenths."""
    taken = (seconds.get((item, rater)) for rater in range(raters))
    return {
        name: "" if each is None else f"{each:.1f}" for name, each in zip(seconds_columns(raters), taken, strict=True)
    }


def _rater(record: Mapping[str, str]) -> str:
    return record.get("rater", "").strip().removesuffix(".0")


def _positive(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) and value > 0 else None
