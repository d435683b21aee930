"""Metrics by step go to a local file first; a thread ships them, and no outage reaches the training loop.

<stage>.jsonl          one point a line: {"step", "time" (ms), "metrics"}, and "total" where the steps to come are known
<stage>.jsonl.cursor   bytes that the tracking store has, replaced in one step
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

logger = logging.getLogger(__name__)

Point = dict[str, Any]
Ship = Callable[[list[Point]], None]
"""Stores some points; raises where it could not. Storing a point twice must be storing it once."""

EVERY_SECONDS = 2.0
RETRY_SECONDS = 10.0
BATCH_POINTS = 200


class Spool:
    """Points of one stage in one run."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        _drop_torn_tail(path)
        self._seen = {(name, point["step"]) for point in read_points(path) for name in point["metrics"]}
        self._file: TextIO = path.open("a")
        self._ship: Ship | None = None
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closing = False

    def ship_to(self, ship: Ship) -> None:
        """Start the thread that ships."""
        self._ship = ship
        self._thread = threading.Thread(target=self._run, name=f"ship {self.path.name}", daemon=True)
        self._thread.start()

    def append(self, step: int, metrics: Mapping[str, float], *, total: int | None = None) -> Point:
        """Make a point of now, and add it. Returns it."""
        point: Point = {"step": step, "time": time.time_ns() // 1_000_000, "metrics": dict(metrics)}
        if total is not None:
            point["total"] = total
        self.add(point)
        return point

    def add(self, point: Point) -> None:
        """Add a point. A metric that already has a value at its step keeps it: a resumed stage repeats steps."""
        step = point["step"]
        new = {name: float(value) for name, value in point["metrics"].items() if (name, step) not in self._seen}
        if new:
            self._seen.update((name, step) for name in new)
            self._file.write(json.dumps({**point, "metrics": new}) + "\n")
            self._file.flush()

    def close(self, timeout: float = 20.0) -> int:
        """Ship what is left for at most `timeout` seconds. Returns how many points stay behind in the file."""
        self._file.close()
        self._closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout)
        return len(unshipped(self.path)[0]) if self._ship is not None else 0

    def _run(self) -> None:
        while True:
            closing = self._closing
            try:
                ship_file(self.path, self._ship_now)
                wait = EVERY_SECONDS
            except Exception as error:  # whatever the store raises: the points are on disk, and this is said
                logger.warning("metrics of %s wait in %s: %s", self.path.stem, self.path, error)
                wait = RETRY_SECONDS
            if closing:
                return
            self._wake.wait(wait)

    def _ship_now(self, points: list[Point]) -> None:
        assert self._ship is not None
        self._ship(points)


def ship_file(path: Path, ship: Ship) -> int:
    """Ship every whole line after the cursor, moving the cursor after each batch. Returns how many points went."""
    shipped = 0
    while True:
        points, cursor = unshipped(path, BATCH_POINTS)
        if not points:
            return shipped
        ship(points)
        _write_cursor(path, cursor)
        shipped += len(points)


def unshipped(path: Path, limit: int | None = None) -> tuple[list[Point], int]:
    """Points after the cursor (at most `limit`), and where the cursor stands once they are shipped."""
    cursor_file = _cursor_file(path)
    cursor = int(cursor_file.read_text()) if cursor_file.is_file() else 0
    return points_after(path, cursor, limit)


def points_after(path: Path, offset: int, limit: int | None = None) -> tuple[list[Point], int]:
    """Whole points from byte `offset` on (at most `limit`; none where there is no file), and where the next begins."""
    points: list[Point] = []
    if not path.is_file():
        return points, offset
    with path.open("rb") as file:
        file.seek(offset)
        for line in file:
            # A line without its end is still being written, or its writer was killed.
            if not line.endswith(b"\n") or len(points) == limit:
                break
            offset += len(line)
            points.append(json.loads(line))
    return points, offset


def read_points(path: Path) -> list[Point]:
    """Every whole point of a file (none where there is no file)."""
    return points_after(path, 0)[0]


def curves(points: Iterable[Point]) -> dict[str, list[tuple[int, float]]]:
    """Metric name to its (step, value) pairs in order of steps."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for point in points:
        for name, value in point["metrics"].items():
            by_name.setdefault(name, []).append((point["step"], value))
    return {name: sorted(pairs, key=lambda pair: pair[0]) for name, pairs in by_name.items()}


def _drop_torn_tail(path: Path) -> None:
    """Cut off a last line whose writer was killed, so that the next point starts a line of its own."""
    if path.is_file():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)


def _cursor_file(path: Path) -> Path:
    return path.with_name(path.name + ".cursor")


def _write_cursor(path: Path, cursor: int) -> None:
    temporary = path.with_name(f".{path.name}.cursor.tmp")
    temporary.write_text(str(cursor))
    os.replace(temporary, _cursor_file(path))
