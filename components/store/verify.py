"""Verify the whole store: find damaged, missing and orphaned files."""

import hashlib
from dataclasses import dataclass, field

from components.store.place import Place
from components.store.records import SHA, Record
from components.store.retention import stored
from components.store.store import ArtifactStore


@dataclass(frozen=True)
class Flaw:
    """A problem with a file of the store."""

    name: str
    problem: str


@dataclass
class Verification:
    """What a store holds, and its problems."""

    store: str
    records: int = 0
    objects: int = 0
    bytes: int = 0
    """Total size of the objects."""
    damaged: list[Flaw] = field(default_factory=list)
    missing: list[Flaw] = field(default_factory=list)
    orphaned: list[Flaw] = field(default_factory=list)
    """Objects that no record names; they are harmless."""


def verify(store: ArtifactStore) -> Verification:
    """Read and check every record, manifest and object, and the local copies of a shared store."""
    report = Verification(store.place.where)
    with store.using():
        whole = _objects(store.place, report)
        if store.shared is not None:
            _objects(store.local, report)
        named: set[str] = set()
        for entry in stored(store, store.place):
            report.records += 1
            if not isinstance(entry.record, Record):
                report.damaged.append(Flaw(entry.path, entry.record.reason))
                continue
            needed = entry.record.objects
            named |= set(needed.values())
            report.missing += [
                Flaw(f"objects/{sha}", f"{entry.record.stage} of {entry.path} needs it as {name}")
                for name, sha in needed.items()
                if sha not in whole
            ]
    report.orphaned = [Flaw(f"objects/{name}", "no record names it") for name in sorted(whole) if name not in named]
    return report


def _objects(place: Place, report: Verification) -> set[str]:
    names = set()
    for entry in place.entries("objects"):
        names.add(entry.name)
        report.objects += 1
        report.bytes += entry.size
        if not SHA.fullmatch(entry.name):
            continue
        digest = hashlib.sha256()
        try:
            for chunk in place.chunks(f"objects/{entry.name}"):
                digest.update(chunk)
        except OSError as error:
            report.damaged.append(Flaw(f"objects/{entry.name}", f"{error.strerror} ({place.where})"))
            continue
        if digest.hexdigest() != entry.name:
            problem = f"its bytes have sha256 {digest.hexdigest()[:12]} ({place.where})"
            report.damaged.append(Flaw(f"objects/{entry.name}", problem))
    return names
