"""The store's artifacts as rows for people and scripts."""

from typing import Any

from components.artifacts import ArtifactStore, Record
from components.store_needs import kept_by, stored
from tasks.keeping import needs


def artifacts(store: ArtifactStore) -> list[dict[str, Any]]:
    """Every record: `stage, key, digest, attempt, size` (bytes, attachments and manifest included), `run` that computed
    it, `time` (UTC), `kept_by`; newest first.

    Raises:
        UserError: what keeps them isn't known, as `tasks.keeping.needs` says.
    """
    sizes = {entry.name: entry.size for entry in store.place.entries("objects")}
    records = stored(store, store.place)
    kept = kept_by(records, needs(store))
    rows = [
        {
            "stage": each.record.stage,
            "key": each.record.key,
            "digest": each.record.digest,
            "attempt": each.record.attempt,
            "size": sum(sizes.get(sha, 0) for sha in set(each.record.objects.values())),
            "run": each.record.run,
            "time": each.record.started,
            "kept_by": sorted(kept.get(each.identity, ())),
        }
        for each in records
        if isinstance(each.record, Record)
    ]
    return sorted(rows, key=lambda row: row["time"], reverse=True)
