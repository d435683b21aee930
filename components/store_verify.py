"""Reading the whole store: what is damaged, missing, or there for nothing."""

import hashlib
from typing import Any

from components.artifacts import ArtifactStore
from components.store_needs import stored
from components.store_place import Place
from components.store_record import SHA, Record


def verify(store: ArtifactStore) -> dict[str, Any]:
    """Read every record, manifest and object through, and the copies here of a store elsewhere.

    Returns:
        `store` (where), the numbers of `records` and `objects` and their `bytes`; and lists of `{name, problem}`:
        `damaged`, `missing`, `orphaned` (objects that no record names; they harm nothing).
    """
    report: dict[str, Any] = {"store": store.place.where, "records": 0, "objects": 0, "bytes": 0}
    report |= {"damaged": [], "missing": [], "orphaned": []}
    with store.using():
        whole = _objects(store.place, report)
        if store.shared is not None:
            _objects(store.local, report)
        named: set[str] = set()
        for each in stored(store, store.place):
            report["records"] += 1
            if not isinstance(each.record, Record):
                report["damaged"].append({"name": each.path, "problem": each.record.reason})
                continue
            needed = each.record.objects
            named |= set(needed.values())
            report["missing"] += [
                {"name": f"objects/{sha}", "problem": f"{each.record.stage} of {each.path} needs it as {name}"}
                for name, sha in needed.items()
                if sha not in whole
            ]
    report["orphaned"] = [
        {"name": f"objects/{name}", "problem": "no record names it"} for name in sorted(whole) if name not in named
    ]
    return report


def _objects(place: Place, report: dict[str, Any]) -> set[str]:
    """Read a place's objects through. Returns the names of all."""
    names = set()
    for entry in place.entries("objects"):
        names.add(entry.name)
        report["objects"] += 1
        report["bytes"] += entry.size
        if not SHA.fullmatch(entry.name):
            continue
        digest = hashlib.sha256()
        for chunk in place.chunks(f"objects/{entry.name}"):
            digest.update(chunk)
        if digest.hexdigest() != entry.name:
            problem = f"its bytes have sha256 {digest.hexdigest()[:12]} ({place.where})"
            report["damaged"].append({"name": f"objects/{entry.name}", "problem": problem})
    return names
