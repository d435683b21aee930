"""Which records are needed: what is named, with all its inputs upstream. And the pins, which name it for good."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from components.artifacts import ArtifactStore
from components.errors import UserError
from components.store_place import Place
from components.store_record import ATTEMPT, KEY, Miss, Record, check_names

Needs = Mapping[str, set[str]]
"""Key or digest of an artifact to whom or what needs it."""


class Stored(NamedTuple):
    """A record's file, and what is in it."""

    place: Place
    key: str
    name: str
    size: int
    """Bytes of the file."""
    record: Record | Miss

    @property
    def path(self) -> str:
        """The file's name in its place."""
        return f"records/{self.key}/{self.name}"

    @property
    def identity(self) -> tuple[str, str]:
        """What tells it from others."""
        return self.place.where, self.path


def stored(store: ArtifactStore, place: Place, every_byte: bool = True) -> list[Stored]:
    """Every record's file of a place, read as `parse_record` says; files of other names are none."""
    found = []
    for entry in place.entries("records"):
        key, _, name = entry.name.partition("/")
        if ATTEMPT.fullmatch(name):
            found.append(Stored(place, key, name, entry.size, store.read(key, name, place, every_byte)))
    return found


def kept_by(records: Iterable[Stored], needs: Needs) -> dict[tuple[str, str], set[str]]:
    """Each needed record's identity, and who needs it: itself, or something that was made from it."""
    by_digest: dict[str, list[Stored]] = defaultdict(list)
    named: list[tuple[Stored, str]] = []
    for each in records:
        if isinstance(each.record, Record):
            by_digest[each.record.digest].append(each)
            named += [(each, who) for who in {*needs.get(each.key, ()), *needs.get(each.record.digest, ())}]
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    while named:
        each, who = named.pop()
        if who in found[each.identity] or not isinstance(each.record, Record):
            continue
        found[each.identity].add(who)
        named += [(other, who) for digest in each.record.inputs.values() for other in by_digest.get(digest, ())]
    return dict(found)


# -- pins ------------------------------------------------------------------------------------------------------------


def write_pin(place: Place, run: str, needed: Iterable[str]) -> bool:
    """Keep what `run` needs, for every computer that shares the place; False where it is pinned already."""
    check_names([run])
    return place.create(f"pins/{run}.json", json.dumps({"run": run, "needs": sorted(set(needed))}, indent=1).encode())


def remove_pin(place: Place, run: str) -> bool:
    """Undo `write_pin`; False where the run was not pinned."""
    if run not in read_pins(place):
        return False
    place.remove(f"pins/{run}.json")
    return True


def read_pins(place: Place) -> dict[str, list[str]]:
    """Pinned run to the keys and digests it needs.

    Raises:
        UserError: a pin can't be read, so that what it keeps isn't known.
    """
    found = {}
    for entry in place.entries("pins"):
        if not entry.name.endswith(".json") or entry.name.startswith("."):
            continue
        try:
            document = json.loads(place.read(f"pins/{entry.name}"))
            needed = [str(each) for each in document["needs"]]
            if not all(KEY.fullmatch(each) for each in needed):
                raise ValueError("it names what is no key and no digest")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{place.where}/pins/{entry.name} can't be read ({error}): what it keeps isn't known. Remove the file, "
                f"then pin the run again."
            ) from error
        found[entry.name.removesuffix(".json")] = needed
    return found
