"""Write two to six runs as one HTML page: curves on shared axes, and tables of what differs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.files import write_whole
from components.base.nested import flatten
from components.gates.table import GATES, MAIN_METRICS
from components.gates.text import number, outcome
from components.keys.code_version import code_version
from flows.reports.diff import LOOKS, called, overlay_of
from flows.reports.page import styled, template
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, load_status

MOST = len(LOOKS)
"""The largest number of runs whose curves can be told apart in one picture."""


class ComparedRun(NamedTuple):
    """A run on the page."""

    status: RunStatus
    name: str
    metrics: Mapping[str, float | None]
    gates: Mapping[str, tuple[str, str]]
    """Outcome and value of each judged gate, by name."""
    options: Mapping[str, JsonValue]


class ComparedRow(NamedTuple):
    """A row of a table: what it shows, and its value in each run."""

    name: str
    words: str
    values: Sequence[object]

    @property
    def differs(self) -> bool:
        """Return whether at least one run has a different value."""
        return any(value != self.values[0] for value in self.values)


def write_comparison(home: Path, runs: Sequence[str], path: Path) -> None:
    """Write the page of two to six runs to `path`.

    Raises:
        UserError: there is no such run, one is named twice, there are too few or too many, or `path` can't be written.
    """
    if not 2 <= len(runs) <= MOST:
        raise UserError(f"--html draws 2 to {MOST} runs; {len(runs)} given.")
    if twice := next((run for run in runs if runs.count(run) > 1), None):
        raise UserError(f"{twice} is named twice. Name each run once.")
    text = comparison(home, runs)
    try:
        write_whole(path, text.encode("utf-8", "backslashreplace"))
    except OSError as error:
        raise UserError(
            f"--html {path}: it can't be written ({error.strerror}). Name a file in a folder that exists."
        ) from error


def comparison(home: Path, runs: Sequence[str]) -> str:
    """Return the page of `runs`, which it shows in that order."""
    found = [_compared(home, run) for run in runs]
    main = [each for of in MAIN_METRICS.values() for each in of]
    metrics = [_row(each.name, each.text, [run.metrics for run in found]) for each in main]
    shown = {each.name for each in main}
    further = sorted({name for run in found for name in run.metrics} - shown)
    return template("diff.html").render(
        runs=found,
        overlay=overlay_of(home, runs),
        options=[row for row in _options(found) if row.differs],
        gates=[
            ComparedRow(name, GATES[name].description if name in GATES else "", [run.gates.get(name) for run in found])
            for name in dict.fromkeys(name for run in found for name in run.gates)
        ],
        metrics=[row for row in metrics if any(value is not None for value in row.values)],
        further=[row for name in further if (row := _row(name, "", [run.metrics for run in found])).differs],
        **styled(),
        written_by=code_version(),
    )


def _compared(home: Path, run: str) -> ComparedRun:
    status = load_status(home, run)
    return ComparedRun(
        status,
        called(status),
        {name: value for stage in status.stages for name, value in stage.metrics.items()},
        {
            gate.name: (outcome(gate), number(gate.value))
            for stage in status.stages
            for gate in stage.gates
            if gate.threshold is not None
        },
        flatten(run_values(home, run)),
    )


def _options(found: Sequence[ComparedRun]) -> list[ComparedRow]:
    names = dict.fromkeys(name for run in found for name in run.options)
    return [_row(name, "", [run.options for run in found]) for name in names]


def _row(name: str, words: str, of: Sequence[Mapping[str, object]]) -> ComparedRow:
    return ComparedRow(name, words, [each.get(name) for each in of])
