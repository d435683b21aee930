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
from tasks.runs.status import RunStatus, load_readable

DAMAGED = "damaged"
"""The state of a run whose run.json can't be read."""


class ListedRun(NamedTuple):
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
    found = [_listed(each) for each in readable]
    for run, written in damaged.items():
        when = datetime.fromtimestamp(written, UTC).isoformat(timespec="microseconds")
        found.append(ListedRun(run, "", "", DAMAGED, when, None, None, None, {}))
    return sorted(found, key=lambda each: each.started, reverse=True)


def _listed(status: RunStatus) -> ListedRun:
    metrics = {name: value for stage in status.stages for name, value in stage.metrics.items()}
    kl, win_rate = metrics.get("policy/kl"), metrics.get("human_eval/win_rate")
    told = (status.run, status.name, status.profile, status.state, status.started, status.seconds)
    failed = [gate.name for stage in status.stages for gate in stage.gates if gate.stops]
    cost = (status.cost, status.saved, status.currency)
    return ListedRun(*told, kl, win_rate, status.tags, *cost, failed)


def selected(runs: Sequence[ListedRun], tags: Sequence[str]) -> list[ListedRun]:
    """Return the runs that have every tag (`key`, or `key=value`).

    Raises:
        UserError: a tag is invalid.
    """
    Label.of(None, tags)
    asked = {"=".join(part.strip() for part in tag.split("=", 1)) for tag in tags}
    return [run for run in runs if asked <= {*run.tags, *(f"{key}={value}" for key, value in run.tags.items())}]


def print_runs(console: Console, runs: Sequence[ListedRun], limit: int, of: int, home: Path) -> None:
    """Print the newest `limit` of `runs`, a selection of the `of` runs in `home`, as a table."""
    if not runs:
        none = "matches" if of else "is there yet; start one with `tether run demo`"
        say(console, f"No run in {home} {none}.")
        return
    now = datetime.now().astimezone()
    columns = {
        "run": [cell(each.run) for each in runs[:limit]],
        "state": [cell(each.state, STYLES.get(each.state, "red")) for each in runs[:limit]],
        "when": [cell(_when(each.started, now)) for each in runs[:limit]],
        "failed gates": [cell(", ".join(each.failed_gates)) for each in runs[:limit]],
        "name": [cell(each.name) for each in runs[:limit]],
        "tags": [cell(" ".join(Label(tags=each.tags).written)) for each in runs[:limit]],
        "KL": [cell("" if each.kl is None else number(each.kl)) for each in runs[:limit]],
        "win rate": [cell("" if each.win_rate is None else f"{each.win_rate:.3f}") for each in runs[:limit]],
        "cost": [cell(price(each.cost, each.currency)) for each in runs[:limit]],
        "seconds": [cell("" if each.seconds is None else f"{each.seconds:,.0f}") for each in runs[:limit]],
    }
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    shown = _fitting(columns, console.width)
    for name, width in shown.items():
        numbers = name in ("KL", "win rate", "cost", "seconds")
        table.add_column(name, width=width, no_wrap=True, overflow="ellipsis", justify="right" if numbers else "left")
    for row in zip(*(columns[name] for name in shown), strict=True):
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
    kept: dict[str, int] = {}
    left = width + 1
    for name in ORDER:
        natural = _width(name, columns[name])
        least = min(natural, LEAST.get(name, natural))
        if any(columns[name]) and (least < left or not kept):
            kept[name] = least
            left -= least + 1
    for name in (name for name in LEAST if name in kept):
        more = min(left, _width(name, columns[name]) - kept[name])
        kept[name] += more
        left -= more
    return {name: kept[name] for name in columns if name in kept}


def _width(name: str, cells: Sequence[Text]) -> int:
    return max(len(name), *(cell.cell_len for cell in cells))


def _when(stamp: str, now: datetime) -> str:
    """Return local time, as short as possible: the hour if today, day and hour if this year, otherwise the date."""
    when = datetime.fromisoformat(stamp).astimezone(now.tzinfo)
    if when.date() == now.date():
        return f"today {when:%H:%M}"
    return f"{when:%b %d %H:%M}" if when.year == now.year else f"{when:%Y-%m-%d}"
