"""Explain why a stage was computed, or which run's result was reused. Made at the look-up, stored in the status."""

from components.base.text import line
from components.keys import changes as key_changes
from components.keys.changes import KeyParts
from components.store.store import ArtifactStore, Miss
from tasks.execution.computing import ASKED
from tasks.runs.explained import Changed, Explanation, Hit, Missed, RecordName
from tasks.runs.status import RunStatus


def miss(store: ArtifactStore, stage: str, key: str, parts: KeyParts, found: Miss, run: str) -> Missed:
    """Explain why `run` computes the (sub-)stage `stage`: the look-up of `key`, made of `parts`, returned `found`."""
    if found.reason == ASKED:
        return Missed(run=run, reason=found.reason, because="asked")
    if store.attempts(key):
        return Missed(run=run, reason=found.reason, because="damaged")
    nearest = key_changes.nearest(parts, ((record, record.parts) for record in store.published_by(stage)))
    if nearest is None:
        return Missed(run=run, reason=found.reason, because="first")
    other, changes = nearest
    compared = RecordName(run=other.run, key=other.key)
    return Changed(run=run, reason=found.reason, compared_with=compared, changes=changes)


def in_a_line(told: Explanation) -> str:
    """Return an explanation in a few words, for the console."""
    match told:
        case Hit():
            return f"{'taken as it is, ' if told.pinned else ''}computed by {told.run}"
        case Changed():
            return key_changes.in_a_line(told.changes)
        case Missed(because="damaged"):
            return f"the record is damaged: {told.reason}"
    return told.reason if told.because == "asked" else "no earlier record"


def lines(status: RunStatus) -> list[str]:
    """Return what `tether status --why` prints for a run."""
    names = (name for stage in status.stages for name in (stage.name, *stage.explained))
    width = max(map(len, names), default=0) + 2
    again = f", {status.origin['stage']} again from run {status.origin['from']}" if "from" in status.origin else ""
    out = [f"run {status.run}{again}"]
    for stage in status.stages:
        if not stage.explained:
            ends = f" (the run ends after {status.until})" if status.until else ""
            why = f"not run{ends}" if stage.state == "not_run" else f"nothing was kept ({stage.state})"
            out.append(f"{stage.name:<{width}}{why}")
        for name, told in stage.explained.items():
            first, *rest = _story(told)
            out += [f"{name:<{width}}{first}", *(f"{'':<{width}}{told}" for told in rest)]
    return out


def _story(told: Explanation) -> list[str]:
    if not isinstance(told, Changed):
        return [f"{told.outcome}: {line(in_a_line(told))}"]
    run, key = told.compared_with.run, told.compared_with.key
    nearest = f"computed: compared with the nearest earlier record (run {line(run)}, key {line(key[:12])})"
    return [nearest, *(f"  {line(str(change))}" for change in told.changes)]
