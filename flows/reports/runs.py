"""List the runs of a home in one table."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from components.gates.gate_text import number
from flows.reports.terminal import STYLES, price
from tasks.execution.stage_progress import cell, say
from tasks.runs.run_label import Label
from tasks.runs.status import load_readable

DAMAGED = "damaged"
"""The state of a run whose run.json can't be read."""


class ListedRun(NamedTuple):  # long: a row of a report
    """A run as `tether runs --json` prints it."""

    run: str
    name: str
    profile: str
    state: str
    started: str
    """ISO 8601, UTC; for a damaged run the time at which its file was written."""
    seconds: float | None
    kl: float | None
    """`policy/kl`: nats a response."""
    win_rate: float | None
    """`human_eval/win_rate` against SFT."""
    tags: Mapping[str, str]
    cost: float | None = None
    """Cost of its stages in this run, in `currency`; None if they have no price."""
    saved: float | None = None
    """What recomputing its reused results would have cost."""
    currency: str = ""
    failed_gates: Sequence[str] = ()
    """Names of the gates that stopped it."""

    def as_json(self) -> dict[str, object]:
        """Return the fields; costs only if the run has a price, `failed_gates` only if a gate stopped it."""
        left = {"cost", "saved", "currency"} if self.cost is None else set()
        left |= set() if self.failed_gates else {"failed_gates"}
        return {name: value for name, value in self._asdict().items() if name not in left}


def listed(home: Path) -> list[ListedRun]:
    """Return every run, newest first. A run that can't be read is listed as damaged."""
    readable, damaged = load_readable(home)
    rows = [
        ListedRun(
            run.run, run.name, run.profile, run.state, run.started, run.seconds, run.metrics.get("policy/kl"),
            run.metrics.get("human_eval/win_rate"), run.tags, run.cost, run.saved, run.currency,
            [gate.name for stage in run.stages for gate in stage.gates if gate.stops],
        )
        for run in readable
    ]  # fmt: skip
    for run, written in damaged.items():
        when = datetime.fromtimestamp(written, UTC).isoformat(timespec="microseconds")
        rows.append(ListedRun(run, "", "", DAMAGED, when, None, None, None, {}))
    return sorted(rows, key=lambda row: row.started, reverse=True)


def selected(runs: Sequence[ListedRun], tags: Sequence[str]) -> list[ListedRun]:
    """Return the runs that have every tag (`key`, or `key=value`).

    Raises:
        UserError: a tag is invalid.
    """
    Label.of(None, tags)
    wanted = {"=".join(part.strip() for part in tag.split("=", 1)) for tag in tags}
    return [run for run in runs if wanted <= {*run.tags, *(f"{key}={value}" for key, value in run.tags.items())}]


def print_runs(console: Console, runs: Sequence[ListedRun], limit: int, of: int, home: Path) -> None:
    """Print the newest `limit` of `runs`, a selection of the `of` runs in `home`, as a table."""
    if not runs:
        none = "matches" if of else "is there yet; start one with `tether run demo`"
        say(console, f"No run in {home} {none}.")
        return
    now = datetime.now().astimezone()
    columns = {
        "run": [cell(run.run) for run in runs[:limit]],
        "state": [cell(run.state, STYLES.get(run.state, "red")) for run in runs[:limit]],
        "when": [cell(_when(run.started, now)) for run in runs[:limit]],
        "failed gates": [cell(", ".join(run.failed_gates)) for run in runs[:limit]],
        "name": [cell(run.name) for run in runs[:limit]],
        "tags": [cell(" ".join(Label(tags=run.tags).written)) for run in runs[:limit]],
        "KL": [cell("" if run.kl is None else number(run.kl)) for run in runs[:limit]],
        "win rate": [cell("" if run.win_rate is None else f"{run.win_rate:.3f}") for run in runs[:limit]],
        "cost": [cell(price(run.cost, run.currency)) for run in runs[:limit]],
        "seconds": [cell("" if run.seconds is None else f"{run.seconds:,.0f}") for run in runs[:limit]],
    }
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    widths = _fitting(columns, console.width)
    for name, width in widths.items():
        numbers = name in ("KL", "win rate", "cost", "seconds")
        table.add_column(name, width=width, no_wrap=True, overflow="ellipsis", justify="right" if numbers else "left")
    for row in zip(*(columns[name] for name in widths), strict=True):
        table.add_row(*row)
    console.print(table)
    if len(runs) > limit:
        say(console, f"{limit} of {len(runs)} runs; --limit {len(runs)} shows all.")


ORDER = ("run", "state", "when", "failed gates", "name", "KL", "win rate", "tags", "cost", "seconds")
"""Columns by importance, for terminals on which not all fit."""
LEAST = {"failed gates": 12, "name": 8, "tags": 8}
"""Columns that may be shortened, and the smallest width of each in characters."""


def _fitting(columns: Mapping[str, Sequence[Text]], width: int) -> dict[str, int]:
    """Return the width of each non-empty column that fits into `width`, in the order on the screen."""
    widths: dict[str, int] = {}
    left = width + 1
    for name in ORDER:
        natural = _width(name, columns[name])
        least = min(natural, LEAST.get(name, natural))
        if any(columns[name]) and (least < left or not widths):
            widths[name] = least
            left -= least + 1
    for name in (name for name in LEAST if name in widths):
        more = min(left, _width(name, columns[name]) - widths[name])
        widths[name] += more
        left -= more
    return {name: widths[name] for name in columns if name in widths}


def _width(name: str, cells: Sequence[Text]) -> int:
    return max(len(name), *(cell.cell_len for cell in cells))


def _when(stamp: str, now: datetime) -> str:
    """Return local time, as short as possible: the hour if today, day and hour if this year, otherwise the date."""
    when = datetime.fromisoformat(stamp).astimezone(now.tzinfo)
    if when.date() == now.date():
        return f"today {when:%H:%M}"
    return f"{when:%b %d %H:%M}" if when.year == now.year else f"{when:%Y-%m-%d}"
