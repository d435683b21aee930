"""A run's end for people: the stages with their main numbers, the gates with value, rule and verdict."""

import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from components.base.errors import naming
from components.data.support_desk.task import SIMULATED
from components.gates.judging import Verdict
from components.gates.table import brief_metrics
from components.gates.text import number, outcome, rule
from tasks.runs.status import RunStatus, StageStatus

STYLES = {
    "failed": "red", "gate_failed": "red", "interrupted": "yellow", "waived": "yellow", "awaiting_labels": "yellow",
    "running": "cyan", "passed": "green", "cached": "green", "not_run": "dim",
}  # fmt: skip
_OUTCOMES = {"FAIL": "red", "WARN": "yellow", "WAIVED": "yellow", "PASS": "green", "OFF": "dim"}


def print_run(console: Console, status: RunStatus, simulated: bool) -> None:
    """Print `status` (as `load_status` gives it) in two tables; `simulated` says so below them."""
    console.print(_stage_table(status))
    gates = [gate for stage in status.stages for gate in stage.gates]
    if gates:
        console.print(_gate_table(gates))
    if simulated:
        console.print(SIMULATED, style="dim")
    console.print(f"run {status.run}: ", Text(status.state, STYLES[status.state]), sep="", highlight=False)


def markdown(status: RunStatus, simulated: bool) -> str:
    """`status` as the Markdown page that is kept with the run: every metric, every gate."""
    lines = [
        f"# Run {status.run}: {status.state}",
        "",
        ", ".join([*map(_escaped, _called(status)), f"profile {status.profile}", f"{status.seconds:.1f} s"])
        + f"{', started by ' + status.user if status.user else ''}.{' ' + SIMULATED if simulated else ''}",
        "",
        "| stage | state | seconds | cached | artifact |",
        "|---|---|---:|---|---|",
    ]
    for stage in status.stages:
        digest = f"`{stage.digest or ''}`"
        lines.append(f"| {stage.name} | {stage.state} | {stage.seconds:.1f} | {_cached(stage)} | {digest} |")
    lines += ["", "## Gates", "", "| gate | outcome | metric | value | rule |", "|---|---|---|---:|---|"]
    for gate in (gate for stage in status.stages for gate in stage.gates):
        lines.append(f"| {gate.name} | {outcome(gate)} | {gate.metric} | {number(gate.value)} | {rule(gate)} |")
    lines += ["", "## Metrics", "", "| metric | value |", "|---|---:|"]
    for stage in status.stages:
        lines += [f"| {name} | {number(value)} |" for name, value in sorted(stage.metrics.items())]
    return "\n".join(lines) + "\n"


def write_report(folder: Path, status: RunStatus, simulated: bool) -> Path:
    """Write `report.md` into the run's folder."""
    path = folder / "report.md"
    with naming(path):
        path.write_text(markdown(status, simulated), encoding="utf-8")
    return path


def _stage_table(status: RunStatus) -> Table:
    title = Text(", ".join([*_called(status), status.profile, f"{status.seconds:.0f} s"]))
    columns = (*_columns("stage", "state", "seconds", "cached"), Column("main metrics", overflow="fold"))
    table = Table(*columns, title=title, title_justify="left", pad_edge=False, box=None)
    for stage in status.stages:
        shown = brief_metrics(stage.name, stage.metrics)
        metrics = "  ".join(f"{name.partition('/')[2]} {number(stage.metrics[name])}" for name in shown)
        state = Text(stage.state, STYLES[stage.state])
        table.add_row(stage.name, state, f"{stage.seconds:.1f}", _cached(stage), metrics)
    return table


def _called(status: RunStatus) -> list[str]:
    """A run's name and tags, as far as it has them."""
    return [each for each in (status.name, " ".join(status.label.written)) if each]


def _escaped(text: str) -> str:
    """What a person wrote, as text of a Markdown page."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", text)


def _gate_table(gates: Sequence[Verdict]) -> Table:
    table = Table(*_columns("gate", "value", "rule", ""), pad_edge=False, box=None)
    for gate in gates:
        word = outcome(gate)
        table.add_row(gate.name, number(gate.value), rule(gate), Text(word, _OUTCOMES[word]))
    return table


def _columns(*names: str) -> list[Column]:
    return [Column(name, no_wrap=True, justify="right" if name in ("seconds", "value") else "left") for name in names]


def _cached(stage: StageStatus) -> str:
    return "yes" if stage.cached else "no" if stage.digest else ""
