"""Progress of a stage: a bar on a terminal, a plain line every few seconds elsewhere."""

import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from components.base.text import line, plain
from components.training.stopping import drop_output
from tasks.execution import logs
from tasks.runs.points import Point

EVERY_SECONDS = 10.0
"""Between plain lines."""

SHOWN = 4
"""Metrics beside a bar or on a line: the first ones the stage reports."""


class Output(Console):
    """Standard output, which goes on in silence once nobody reads it: training does not end for its progress."""

    def __init__(self) -> None:
        self._to = _Silenced()
        super().__init__(file=self._to)  # type: ignore[arg-type]

    @property
    def lost(self) -> str:
        """Why it can't be written any more; empty while it can."""
        return self._to.lost


def output() -> Console:
    """Where a run says how it goes: standard output, or the log where that is JSON."""
    return Console(file=logs.LogLines(logs.logger.info), width=200) if logs.as_json() else Output()


class _Silenced:
    """`sys.stdout`, whose errors are kept and not raised."""

    def __init__(self) -> None:
        self.lost = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    @property
    def _file(self) -> Any:
        return getattr(sys.stdout, "rich_proxied_file", sys.stdout)  # a live display puts a proxy there

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


class StageProgress:
    """One stage's progress; use as a context, call `show` for every point."""

    def __init__(self, console: Console, stage: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._stage, self._clock = console, stage, clock
        self._next_line = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[pace]}"),
            TextColumn("{task.fields[metrics]}", table_column=Column(ratio=1, no_wrap=True)),  # what room there is
            console=console, transient=True, disable=not console.is_terminal, expand=True,
            speed_estimate_period=math.inf, get_time=clock,  # a step may take minutes
        )  # fmt: skip
        # On no terminal the two are drawn nowhere, and measure the pace all the same.
        self._steps = self._bar.add_task(stage, total=None, pace="", metrics="")
        self._tokens = self._bar.add_task("tokens", total=None, visible=False, pace="", metrics="")

    def __enter__(self) -> "StageProgress":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def show(self, point: Point) -> None:
        """Show that the point's steps are done, of its total where known."""
        step, total = point["step"], point.get("total", self._bar.tasks[0].total)
        of = f"/{total:.0f}" if total else ""
        if point.get("resumed"):
            self._bar.reset(self._steps, completed=step, total=total)  # what was done before tells nothing of the pace
            self._bar.reset(self._tokens)
            say(self._console, f"  {self._stage}: resuming at step {step}{of}")
            return
        self._bar.advance(self._tokens, point.get("tokens", 0))
        self._bar.update(self._steps, completed=step, total=total)
        text = "  ".join(f"{name} {value:.5g}" for name, value in list(point["metrics"].items())[:SHOWN])
        pace = self._pace()
        self._bar.update(self._steps, pace=pace, metrics=escape(plain(text)))
        if self._bar.disable and (self._clock() >= self._next_line or step == total):
            self._next_line = self._clock() + EVERY_SECONDS
            say(self._console, "  ".join(part for part in (f"  {self._stage} {step}{of}", pace, text) if part))

    def _pace(self) -> str:
        """When the stage's last step will be done, and how fast it goes; empty before two steps are seen."""
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
    """Print a line as it is: no markup, no wrapping, and nothing that commands the terminal."""
    console.print(plain(text), markup=False, highlight=False, soft_wrap=True)


def cell(text: str, style: str = "") -> Text:
    """Return a table's cell as it is: one line, no markup, and nothing that commands the terminal."""
    return Text(line(text), style)
