"""Find what the store has to keep for runs, pins and registered models. Asks MLflow, which it imports when called."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.store.retention import kept_by, read_pins, stored
from components.store.store import ArtifactStore, Record
from tasks.runs.status import RUN_FILE, load_readable
from tasks.tracking.registry import versions

logger = logging.getLogger(__name__)

KEPT_RUNS = 10
"""How many of the newest runs are kept by default."""


def requirements(store: ArtifactStore, keep_runs: int = KEPT_RUNS) -> dict[str, set[str]]:
    """Map a key or digest to what needs it: newest runs, running and waiting runs, pins and registered models.

    Raises:
        UserError: a run, a pin or MLflow's registry can't be read, so it is unknown what they need.
    """
    keepers: dict[str, set[str]] = defaultdict(set)

    def need(who: str, names: Iterable[str]) -> None:
        for name in names:
            keepers[name].add(who)

    locked = store.held_keys()
    pins = {**read_pins(store.local), **read_pins(store.place)}
    statuses, damaged = load_readable(store.home)
    if damaged:
        raise UserError(
            f"{store.home / 'runs' / min(damaged) / RUN_FILE} is damaged, so Tether cannot tell what that run needs. "
            f"Restore it, or remove the run's folder."
        )
    newest = {recorded.run for recorded in statuses[:keep_runs]}
    for status in statuses:
        run, wanted = status.run, status.results
        # A worker continues to compute even if the run that ordered it has died.
        at_work = status.state in ("running", "awaiting_labels") or locked & set(wanted)
        if run in newest or at_work or run in pins:
            need(f"run {run}", wanted)
    need("at work", locked)
    for run, names in pins.items():
        need(f"pin {run}", names)
    for model, names in registered(store.home).items():
        need(f"model {model}", names)
    return dict(keepers)


def registered(home: Path) -> dict[str, list[str]]:
    """Return the keys and digests that each version of a registered model was made from. Raises as `versions` does."""
    made_from = re.compile(r"lineage\.(.*_)?digest|tether\.key")  # tags, as tasks/runs/journal.py names them
    return {
        f"{version.name} version {version.version}": [
            value for tag, value in version.tags.items() if made_from.fullmatch(tag)
        ]
        for version in versions(home)
    }


class StoredArtifact(NamedTuple):
    """A record, and what protects it from garbage collection."""

    record: Record
    size: int
    """In bytes, including attachments and manifest."""
    kept_by: list[str] | None
    """None if it is unknown, because a file is damaged."""

    def as_json(self) -> dict[str, object]:
        """Return it as `tether store ls --json` prints it."""
        fields = ("stage", "key", "digest", "attempt", "run", "imported")
        values = {name: getattr(self.record, name) for name in fields}
        return {**values, "time": self.record.started, "size": self.size, "kept_by": self.kept_by}


def artifacts(store: ArtifactStore) -> list[StoredArtifact]:
    """List every record, newest first. If `requirements` raises an error, a warning says so and `kept_by` is None."""
    sizes = {entry.name: entry.size for entry in store.place.entries("objects")}
    records = stored(store, store.place)
    keepers: dict[tuple[str, str], set[str]] | None = None
    try:
        keepers = kept_by(records, requirements(store))
    except UserError as error:
        logger.warning("Tether does not know which artifacts are needed: %s", error)
    rows = [
        StoredArtifact(
            artifact.record,
            sum(sizes.get(sha, 0) for sha in set(artifact.record.objects.values())),
            None if keepers is None else sorted(keepers.get(artifact.identity, ())),
        )
        for artifact in records
        if isinstance(artifact.record, Record)
    ]
    return sorted(rows, key=lambda row: row.record.started, reverse=True)
