"""Show a stage's progress: a bar on a terminal, otherwise a plain line every few seconds."""

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from components.base.text import line, plain
from components.training.stopping import drop_output
from tasks.execution import logs
from tasks.runs.points import Point

EVERY_SECONDS = 10.0
"""Seconds between plain lines."""

SHOWN = 4
"""Number of metrics shown with a bar or on a line: the first ones that the stage reports."""


class Output(Console):
    """Standard output. If nobody can read it any more, it becomes silent, so that training does not fail because of
    it."""

    def __init__(self) -> None:
        self._to = _Silenced()
        super().__init__(file=self._to)  # type: ignore[arg-type]

    @property
    def lost(self) -> str:
        """Return why it can no longer be written; empty while it can."""
        return self._to.lost


def output() -> Console:
    """Return the console for a run's messages: standard output, or the log if log lines are JSON."""
    return Console(file=logs.LogLines(logs.logger.info), width=200) if logs.as_json() else Output()


class _Silenced:
    """`sys.stdout` with errors recorded instead of raised."""

    def __init__(self) -> None:
        self.lost = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def _file(self) -> Any:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # a live display replaces stdout by a proxy

    def write(self, text: str) -> int:
        self._unless_lost(lambda: self._file.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_lost(lambda: self._file.flush())

    def _unless_lost(self, call: Callable[[], object]) -> None:
        try:
            call()
        except OSError as error:
            self.lost = self.lost or error.strerror or type(error).__name__
            drop_output()


class _Count(MofNCompleteColumn):
    """Steps of how many; empty where nothing is counted."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None and not task.completed else super().render(task)


class StageProgress:
    """One stage's progress. Use it as a context manager, and call `show` for every point."""

    def __init__(self, console: Console, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._stage, self._clock = console, stage, clock
        self._next_line, self._doing = 0.0, ""
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(16), _Count(), TimeElapsedColumn(),
            TextColumn("{task.fields[pace]}"),
            TextColumn("{task.fields[metrics]}", table_column=Column(ratio=1, no_wrap=True)),  # the remaining width
            console=console, transient=True, disable=not console.is_terminal, expand=True,
            speed_estimate_period=math.inf, get_time=clock,  # a step may take minutes
        )  # fmt: skip
        # Without a terminal these tasks are not drawn, but they still measure the pace.
        self._steps = self._bar.add_task(stage, total=None, pace="", metrics="")
        self._tokens = self._bar.add_task("tokens", total=None, visible=False, pace="", metrics="")

    def __enter__(self) -> "StageProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, point: Point) -> None:
        """Show that the point's steps are done, and the total if known; or what the stage does beside its steps."""
        doing = line(point.get("doing") or "")
        if doing != self._doing:  # what is counted now has its own pace and total
            self._doing, self._bar.tasks[0].total = doing, None
            self._bar.reset(self._steps)
            self._bar.reset(self._tokens)
            if doing and self._bar.disable:
                say(self._console, f"  {self._stage}: {doing}")
        step, total = point["step"], point.get("total", self._bar.tasks[0].total)
        self._bar.tasks[0].total = total  # `update` would forget the pace
        if doing:
            self._bar.update(self._steps, completed=step, pace="", metrics=escape(doing))
            return
        of = f"/{total:.0f}" if total else ""
        if point.get("resumed"):
            # Earlier steps say nothing about the current pace.
            self._bar.reset(self._steps, completed=step, total=total)
            self._bar.reset(self._tokens)
            say(self._console, f"  {self._stage}: resuming at step {step}{of}")
            return
        self._bar.advance(self._tokens, point.get("tokens", 0))
        self._bar.update(self._steps, completed=step)
        text = "  ".join(f"{name} {value:.5g}" for name, value in list(point["metrics"].items())[:SHOWN])
        pace = self._pace()
        self._bar.update(self._steps, pace=pace, metrics=escape(plain(text)))
        if self._bar.disable and (self._clock() >= self._next_line or step == total):
            self._next_line = self._clock() + EVERY_SECONDS
            say(self._console, "  ".join(part for part in (f"  {self._stage} {step}{of}", pace, text) if part))

    def _pace(self) -> str:
        steps, tokens = self._bar.tasks
        parts = []
        if steps.remaining and steps.time_remaining is not None:
            parts.append(f"ETA {timedelta(seconds=steps.time_remaining)}")
        if tokens.speed:
            parts.append(f"{tokens.speed:,.0f} tokens/s")
        elif steps.speed:
            parts.append(f"{steps.speed:,.3g}/s")
        return "  ".join(parts)


def say(console: Console, text: str) -> None:
    """Print a line unchanged: without markup, wrapping or terminal escape codes."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def cell(text: str, style: str = "") -> Text:
    """Return a table cell with the text unchanged: one line, without markup or terminal escape codes."""
    return Text(line(text), style)
