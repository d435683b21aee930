"""Points of a stage in a file: metrics by step, written before anything else uses them.

<stage>.jsonl   one point a line: {"step", "time" (ms), "metrics"}; "total" (steps), "tokens" and "samples" if known
"""

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from components.base.errors import naming

logger = logging.getLogger(__name__)

Point = dict[str, Any]


class Spool:
    """Writes the points of one stage in one run."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        if path.is_file():  # remove an incomplete last line, left by a killed writer
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)
        self._seen = {(name, point["step"]) for point in read_points(path) for name in point["metrics"]}
        self._file: TextIO = path.open("a")

    def append(self, step: int, metrics: Mapping[str, float], **more: Any) -> Point:
        """Add a point with the current time and return it; entries of `more` that are None are left out."""
        point: Point = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": dict(metrics)}
        point |= {name: value for name, value in more.items() if value is not None}
        self.add(point)
        return point

    def add(self, point: Point) -> None:
        """Add a point. A metric that already has a value at this step keeps it, because a resumed stage repeats
        steps."""
        step = point["step"]
        new = {name: float(value) for name, value in point["metrics"].items() if (name, step) not in self._seen}
        if new:
            self._seen.update((name, step) for name in new)
            with naming(self.path):
                self._file.write(json.dumps({**point, "metrics": new}) + "\n")
                self._file.flush()

    def close(self) -> None:
        self._file.close()


def points_file(folder: Path, stage: str) -> Path:
    return folder / "metrics" / f"{stage}.jsonl"


def points_after(path: Path, offset: int, limit: int | None = None) -> tuple[list[Point], int]:
    """Return the complete points from byte `offset` on (at most `limit`; none without a file), and the next offset.

    Damaged lines are left out and counted in a warning, because a curve with a gap is better than none.
    """
    points: list[Point] = []
    damaged = 0
    if not path.is_file():
        return points, offset
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            # A line without a line feed is still being written, or its writer was killed.
            if not line.endswith(b"\n") or len(points) == limit:
                break
            offset += len(line)
            if _is_point(line):
                points.append(json.loads(line))
            else:
                damaged += 1
    if damaged:
        logger.warning("%s: %d damaged lines are left out of its curves", path, damaged)
    return points, offset


def _is_point(line: bytes) -> bool:
    try:
        point = json.loads(line)
        whole = isinstance(point["step"], int) and isinstance(point["time"], int)
        return whole and all(isinstance(value, float) for value in point["metrics"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return False


def read_points(path: Path) -> list[Point]:
    """Return all complete points of a file; none without a file."""
    return points_after(path, 0)[0]


def curves(points: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs of each metric, in order of steps."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for name, value in point["metrics"].items():
            by_name.setdefault(name, []).append((point["step"], value))
    return {name: sorted(pairs, key=lambda pair: pair[0]) for name, pairs in by_name.items()}
