"""Progress of a stage: a bar on a terminal, a plain line every few seconds elsewhere."""

import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks.spool import Point

EVERY_SECONDS = 10.0
"""Between plain lines."""

SHOWN = 4
"""Metrics beside a bar or on a line: the first ones the stage reports."""


class StageProgress:
    """One stage's progress; use as a context, call `show` for every point."""

    def __init__(self, console: Console, stage: str) -> None:
        self._console = console
        self._stage = stage
        self._bar: Progress | None = None
        self._task: Any = None
        self._total: int | None = None
        self._next_line = 0.0

    def __enter__(self) -> "StageProgress":
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[metrics]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task(self._stage, total=None, metrics="")
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, point: Point) -> None:
        """Show that the point's steps are done, of its total where known."""
        step, metrics, total = point["step"], point["metrics"], point.get("total")
        self._total = total if total is not None else self._total
        text = "  ".join(f"{name} {value:.5g}" for name, value in list(metrics.items())[:SHOWN])
        if self._bar is not None:
            self._bar.update(self._task, completed=step, total=self._total, metrics=escape(text))
            return
        now = time.monotonic()
        if now >= self._next_line or step == self._total:
            self._next_line = now + EVERY_SECONDS
            of = f"/{self._total}" if self._total else ""
            say(self._console, f"  {self._stage} {step}{of}  {text}")


def say(console: Console, text: str) -> None:
    """Print a line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
