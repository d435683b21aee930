"""Explain why a stage was computed, or which run's result was reused. Made at the look-up, stored in the status."""

from typing import cast

from components.base.settings import Settings
from components.base.text import line
from components.keys import changes as key_changes
from components.keys.changes import Change, KeyParts
from components.store.store import ArtifactStore, Miss, Record
from tasks.execution.computing import ASKED
from tasks.execution.keying import Inputs, whole_job
from tasks.runs.explained import Changed, Explanation, Hit, Missed, RecordName
from tasks.runs.status import RunStatus


def miss(store: ArtifactStore, stage: str, key: str, parts: KeyParts, missing: Miss, run: str) -> Missed:
    """Explain why `run` computes the (sub-)stage `stage`: the look-up of `key`, made of `parts`, returned `missing`."""
    if missing.reason == ASKED:
        return Missed(run=run, reason=missing.reason, because="asked")
    if store.attempts(key):
        return Missed(run=run, reason=missing.reason, because="damaged")
    nearest = key_changes.nearest(parts, ((record, record.parts) for record in store.published_by(stage)))
    if nearest is None:
        return Missed(run=run, reason=missing.reason, because="first")
    other, changes = nearest
    compared = RecordName(run=other.run, key=other.key)
    return Changed(run=run, reason=missing.reason, compared_with=compared, changes=changes)


def unkeyed_changes(record: Record, job: Settings, inputs: Inputs) -> list[Change]:
    """Return in what a job differs from that of a record with the same key; nothing for older records."""
    before = cast(KeyParts | None, record.environment.get("whole"))
    return [] if before is None else key_changes.changes(before, whole_job(job, inputs))


def in_a_line(why: Explanation) -> str:
    """Return an explanation in a few words, for the console."""
    match why:
        case Hit():
            others = f"; not in its key: {key_changes.in_a_line(why.differing)}" if why.differing else ""
            return f"{'taken as it is, ' if why.pinned else ''}computed by {why.run}{others}"
        case Changed():
            return key_changes.in_a_line(why.changes)
        case Missed(because="damaged"):
            return f"the record is damaged: {why.reason}"
    return why.reason if why.because == "asked" else "no earlier record"


def lines(status: RunStatus) -> list[str]:
    """Return what `tether status --why` prints for a run."""
    names = (name for stage in status.stages for name in (stage.name, *stage.explained))
    width = max(map(len, names), default=0) + 2
    again = f", {status.origin['stage']} again from run {status.origin['from']}" if "from" in status.origin else ""
    out = [f"run {status.run}{again}"]
    for stage in status.stages:
        if not stage.explained:
            ends = f" (the run ends after {status.until})" if status.until else ""
            nothing = f"not run{ends}" if stage.state == "not_run" else f"nothing was kept ({stage.state})"
            out.append(f"{stage.name:<{width}}{nothing}")
        for name, why in stage.explained.items():
            first, *rest = _story(why)
            out += [f"{name:<{width}}{first}", *(f"{'':<{width}}{change}" for change in rest)]
    return out


def _story(why: Explanation) -> list[str]:
    if not isinstance(why, Changed):
        return [f"{why.outcome}: {line(in_a_line(why))}"]
    run, key = why.compared_with.run, why.compared_with.key
    nearest = f"computed: compared with the nearest earlier record (run {line(run)}, key {line(key[:12])})"
    return [nearest, *(f"  {line(str(change))}" for change in why.changes)]
