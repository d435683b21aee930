"""Two runs side by side: data, options, code, libraries, metrics, gates."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.artifacts import ArtifactStore, Record
from components.key_changes import changes
from flows.bases import run_values
from flows.report import number, outcome
from tasks.recording import flatten
from tasks.status import load_status


def diff(home: Path, one: str, other: str) -> dict[str, Any]:
    """What differs between two runs, as JSON.

    Returns:
        `{runs, options, stages}`: `options` `{dotted name: [one, other]}` of their configs; a stage is `{name, states,
        digests, same, changes, metrics, gates}` with `changes` those of its key's parts (`components.key_changes`),
        `metrics` and `gates` `{name: [one, other]}` where they differ. None where a run has no such thing.

    Raises:
        UserError: there is no such run.
    """
    store = ArtifactStore(home)
    both = [load_status(home, run) for run in (one, other)]
    configs = [flatten(run_values(home, run["run"])) for run in both]
    pairs = zip(both[0]["stages"], both[1]["stages"], strict=True)
    return {
        "runs": [{name: run[name] for name in ("run", "profile", "state", "seconds")} for run in both],
        "options": _differing(*configs),
        "stages": [_stage(store, *pair) for pair in pairs],
    }


def _stage(store: ArtifactStore, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    records = [_record(store, each) for each in (one, other)]
    found = changes(*(record.parts for record in records if record)) if all(records) else []
    gates = [{gate["name"]: outcome(gate) for gate in each["gates"]} for each in (one, other)]
    return {
        "name": one["name"],
        "states": [one["state"], other["state"]],
        "digests": [one["digest"], other["digest"]],
        "same": one["digest"] is not None and one["digest"] == other["digest"],
        "changes": [{**change._asdict(), "text": str(change)} for change in found],
        "metrics": _differing(one["metrics"], other["metrics"]),
        "gates": _differing(*gates),
    }


def _record(store: ArtifactStore, stage: Mapping[str, Any]) -> Record | None:
    found = store.published(stage["key"]) if stage["key"] else []
    return next((record for record in found if record.digest == stage["digest"]), None)


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Name to both values, None where there is none, of what isn't equal."""
    names = dict.fromkeys([*one, *other])
    return {name: [one.get(name), other.get(name)] for name in names if one.get(name) != other.get(name)}


def text(found: Mapping[str, Any]) -> str:
    """The same for people."""
    one, other = found["runs"]
    lines = [f"{run['run']}  {run['profile']}, {run['state']}, {run['seconds']:.0f} s" for run in (one, other)]
    if found["options"]:
        lines += ["", "options", *(f"  {name}: {_pair(values)}" for name, values in found["options"].items())]
    for stage in found["stages"]:
        digests = [(digest or "none")[:12] for digest in stage["digests"]]
        told = f"the same, {digests[0]}" if stage["same"] else f"{digests[0]} | {digests[1]}"
        lines += ["", f"{stage['name']}  {told}"]
        if stage["states"][0] != stage["states"][1]:
            lines.append(f"  state: {_pair(stage['states'])}")
        lines += [f"  {change['text']}" for change in stage["changes"]]
        lines += [f"  {name}: {number(a)} | {number(b)}" for name, (a, b) in sorted(stage["metrics"].items())]
        lines += [f"  gate {name}: {_pair(values)}" for name, values in stage["gates"].items()]
    return "\n".join(lines)


def _pair(values: list[Any]) -> str:
    return " | ".join("none" if value is None else str(value) for value in values)
