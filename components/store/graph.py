"""What was made of what: the records of a store as a graph of artifacts and external inputs."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import NamedTuple, Self

from components.base.errors import UserError
from components.store.records import Miss, Record
from components.store.retention import stored
from components.store.store import ArtifactStore

SHORTEST_PREFIX = 6


class Node(NamedTuple):
    """An artifact, or a file or folder that no stage made."""

    digest: str
    names: tuple[str, ...]
    """What those who read it call it (`data`, `sft`, `preferences`)."""
    records: tuple[Record, ...]
    """Newest first, imported ones last: one artifact may be the result of several keys. None for an external input."""


class Graph:
    """Every artifact of a store, with what it was made of and what was made of it."""

    def __init__(self, records: Iterable[Record], unreadable: Mapping[str, Miss] | None = None) -> None:
        self.unreadable = dict(unreadable or {})
        """Each key whose record doesn't parse, and why: what it was made of, and made into, is not in the graph."""
        self._records: dict[str, list[Record]] = defaultdict(list)
        self._names: dict[str, set[str]] = defaultdict(set)
        self._readers: dict[str, set[str]] = defaultdict(set)
        for record in sorted(records, key=lambda each: (not each.imported, each.started, each.attempt), reverse=True):
            self._records[record.digest].append(record)
            for name, digest in record.inputs.items():
                self._names[digest].add(name)
                self._readers[digest].add(record.digest)

    @classmethod
    def of(cls, store: ArtifactStore) -> Self:
        """Of all the records of a store; a key that was computed again is readable by its newer record."""
        found = stored(store, store.place)
        records = [each.record for each in found if isinstance(each.record, Record)]
        keys = {record.key for record in records}
        return cls(records, {e.key: e.record for e in found if isinstance(e.record, Miss) and e.key not in keys})

    def of_keys(self, keys: Collection[str]) -> Self:
        """The same, but an artifact that one of `keys` gave is of what that was made of, whatever else gave it too."""
        chosen = ([each for each in records if each.key in keys] or records for records in self._records.values())
        return type(self)(chain.from_iterable(chosen), self.unreadable)

    def node(self, digest: str) -> Node:
        """What is known of a digest."""
        return Node(digest, tuple(sorted(self._names.get(digest, ()))), tuple(self._records.get(digest, ())))

    def find(self, prefix: str) -> str | None:
        """The digest that begins with `prefix`, or that of the key that does; None where there is none.

        Raises:
            UserError: several do.
        """
        if len(prefix) < SHORTEST_PREFIX:
            return None
        found = {digest for digest in (*self._records, *self._names) if digest.startswith(prefix)}
        found |= {d for d, records in self._records.items() if any(each.key.startswith(prefix) for each in records)}
        if len(found) > 1:
            shown = ", ".join(sorted(each[:16] for each in found))
            raise UserError(f"{prefix}: several artifacts have a digest that begins so ({shown}). Give more of it.")
        return next(iter(found), None)

    def upstream(self, digests: Iterable[str]) -> list[Node]:
        """`digests` and all that they were made of, each once, what goes in before what comes out."""
        return [self.node(digest) for digest in self._walk(digests, self._inputs)]

    def downstream(self, digests: Iterable[str]) -> list[Node]:
        """`digests` and all that was made of them, each once, what goes in before what comes out."""
        found = self._walk(digests, lambda digest: sorted(self._readers.get(digest, ())))
        return [self.node(digest) for digest in reversed(found)]

    def rests_on_import(self, digests: Iterable[str]) -> bool:
        """Whether only an imported record stands for one of `digests`, or for anything that it was made of."""
        return any(node.records and node.records[0].imported for node in self.upstream(digests))

    def inputs(self, digest: str) -> dict[str, str]:
        """Name to digest of what an artifact was made of; of its newest record."""
        records = self._records.get(digest)
        return dict(records[0].inputs) if records else {}

    def _inputs(self, digest: str) -> list[str]:
        return sorted({each for record in self._records.get(digest, ()) for each in record.inputs.values()})

    @staticmethod
    def _walk(digests: Iterable[str], following: Callable[[str], list[str]]) -> list[str]:
        """Depth first, a node after all that follow it. Forged records may name each other in a circle."""
        done: dict[str, None] = {}
        begun: set[str] = set()
        stack = [(digest, False) for digest in reversed(list(digests))]
        while stack:
            digest, left = stack.pop()
            if left:
                done.setdefault(digest)
            elif digest not in begun:
                begun.add(digest)
                stack.append((digest, True))
                stack += [(each, False) for each in following(digest) if each not in done]
        return list(done)
