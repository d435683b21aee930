"""Compare two runs: data, options, code, libraries, metrics and gates."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from components.base.nested import flatten
from components.base.text import line
from components.gates.gate_text import number, outcome
from components.keys.changes import Change, changes
from components.store.store import ArtifactStore
from flows.reports.run_facts import taken_record
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, StageStatus, load_status

V = TypeVar("V")
Differing = dict[str, tuple[V | None, V | None]]
"""Maps a name to both runs' values if they differ; None if a run has no such value."""


class StageDiff(NamedTuple):
    """How a stage of two runs differs."""

    name: str
    states: tuple[str, str]
    digests: tuple[str | None, str | None]
    changes: list[Change]
    """Changes in the parts of its key."""
    metrics: Differing[float]
    gates: Differing[str]

    @property
    def same(self) -> bool:
        return self.digests[0] is not None and self.digests[0] == self.digests[1]


class RunDiff(NamedTuple):
    """How two runs differ."""

    runs: tuple[RunStatus, RunStatus]
    options: Differing[object]
    """By dotted name."""
    stages: list[StageDiff]

    def as_json(self) -> dict[str, Any]:
        """Return what `tether diff --json` prints."""
        return {
            "runs": [run.model_dump(include={"run", "profile", "state", "seconds"}) for run in self.runs],
            "options": self.options,
            "stages": [
                stage._asdict()
                | {"same": stage.same, "changes": [{**asdict(change), "text": str(change)} for change in stage.changes]}
                for stage in self.stages
            ],
        }


def diff(home: Path, one: str, other: str) -> RunDiff:
    """Return how two runs differ.

    Raises:
        UserError: there is no such run.
    """
    store = ArtifactStore(home)
    first, second = load_status(home, one), load_status(home, other)
    by_name = [{stage.name: stage for stage in status.stages} for status in (first, second)]
    names = dict.fromkeys([*by_name[0], *by_name[1]])
    return RunDiff(
        runs=(first, second),
        options=_differing(*(flatten(run_values(home, status.run)) for status in (first, second))),
        stages=[  # one that only one run has is compared with one that was not run
            _stage(store, *(stages.get(name, StageStatus(name=name)) for stages in by_name)) for name in names
        ],
    )


def _stage(store: ArtifactStore, one: StageStatus, other: StageStatus) -> StageDiff:
    first, second = taken_record(store, one), taken_record(store, other)
    return StageDiff(
        name=one.name,
        states=(one.state, other.state),
        digests=(one.digest, other.digest),
        changes=changes(first.parts, second.parts) if first and second else [],
        metrics=_differing(one.metrics, other.metrics),
        gates=_differing(*({verdict.name: outcome(verdict) for verdict in stage.gates} for stage in (one, other))),
    )


def _differing(one: Mapping[str, V | None], other: Mapping[str, V | None]) -> Differing[V]:
    names = dict.fromkeys([*one, *other])
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def text(difference: RunDiff) -> str:
    """Return the differences as text."""
    lines = [
        f"{run.run}  {line(run.profile)}, {run.state}, {run.seconds:.0f} s"
        for run in difference.runs
    ]
    if difference.options:
        lines += ["", "options", *(f"  {name}: {_pair(values)}" for name, values in difference.options.items())]
    for stage in difference.stages:
        first, second = ((digest or "none")[:12] for digest in stage.digests)
        lines += ["", f"{stage.name}  {f'the same, {first}' if stage.same else f'{first} | {second}'}"]
        if stage.states[0] != stage.states[1]:
            lines.append(f"  state: {_pair(stage.states)}")
        lines += [f"  {line(str(change))}" for change in stage.changes]
        lines += [f"  {name}: {number(a)} | {number(b)}" for name, (a, b) in sorted(stage.metrics.items())]
        lines += [f"  gate {name}: {_pair(values)}" for name, values in stage.gates.items()]
    return "\n".join(lines)


def _pair(values: tuple[object, object]) -> str:
    return " | ".join("none" if value is None else line(str(value)) for value in values)
