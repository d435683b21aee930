"""Lineage: the records of a store as a graph of artifacts and external inputs."""

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
    """An artifact, or an external input: a file or folder that no stage made."""

    digest: str
    names: tuple[str, ...]
    """The input names under which stages read it (`data`, `sft`, `preferences`)."""
    records: tuple[Record, ...]
    """Its records, newest first, imported ones last; several keys may give one artifact. Empty for external inputs."""


class Graph:
    """Every artifact of a store, with its inputs and with the artifacts made from it."""

    def __init__(self, records: Iterable[Record], unreadable: Mapping[str, Miss] | None = None) -> None:
        self.unreadable = dict(unreadable or {})
        """Maps a key whose record does not parse to the reason. Its inputs and outputs are missing in the graph."""
        self._records: dict[str, list[Record]] = defaultdict(list)
        self._names: dict[str, set[str]] = defaultdict(set)
        self._readers: dict[str, set[str]] = defaultdict(set)
        for record in sorted(records, key=lambda r: (not r.imported, r.started, r.attempt), reverse=True):
            self._records[record.digest].append(record)
            for name, digest in record.inputs.items():
                self._names[digest].add(name)
                self._readers[digest].add(record.digest)

    @classmethod
    def of(cls, store: ArtifactStore) -> Self:
        """Return the graph of all the records of a store. A key counts as readable if any of its records is."""
        entries = stored(store, store.place)
        records = [entry.record for entry in entries if isinstance(entry.record, Record)]
        keys = {record.key for record in records}
        return cls(records, {e.key: e.record for e in entries if isinstance(e.record, Miss) and e.key not in keys})

    def of_keys(self, keys: Collection[str]) -> Self:
        """Return this graph, but for an artifact that one of `keys` produced, use only that key's inputs."""
        chosen = ([record for record in records if record.key in keys] or records for records in self._records.values())
        return type(self)(chain.from_iterable(chosen), self.unreadable)

    def node(self, digest: str) -> Node:
        return Node(digest, tuple(sorted(self._names.get(digest, ()))), tuple(self._records.get(digest, ())))

    def find(self, prefix: str) -> str | None:
        """Return the digest that begins with `prefix`, or the artifact of the key that does; None if there is none.

        Raises:
            UserError: `prefix` is ambiguous.
        """
        if len(prefix) < SHORTEST_PREFIX:
            return None
        digests = {digest for digest in (*self._records, *self._names) if digest.startswith(prefix)}
        digests |= {d for d, records in self._records.items() if any(r.key.startswith(prefix) for r in records)}
        if len(digests) > 1:
            names = ", ".join(sorted(digest[:16] for digest in digests))
            raise UserError(f"{prefix}: several artifacts have a digest that begins so ({names}). Give more of it.")
        return next(iter(digests), None)

    def upstream(self, digests: Iterable[str]) -> list[Node]:
        """Return `digests` and everything that they were made from, each once, inputs before outputs."""
        return [self.node(digest) for digest in self._walk(digests, self._inputs)]

    def downstream(self, digests: Iterable[str]) -> list[Node]:
        """Return `digests` and everything that was made from them, each once, inputs before outputs."""
        ordered = self._walk(digests, lambda digest: sorted(self._readers.get(digest, ())))
        return [self.node(digest) for digest in reversed(ordered)]

    def rests_on_import(self, digests: Iterable[str]) -> bool:
        """Return whether one of `digests`, or anything upstream of it, has imported records only."""
        return any(node.records and node.records[0].imported for node in self.upstream(digests))

    def inputs(self, digest: str) -> dict[str, str]:
        """Return an artifact's inputs, name to digest, by its newest record."""
        records = self._records.get(digest)
        return dict(records[0].inputs) if records else {}

    def _inputs(self, digest: str) -> list[str]:
        return sorted({source for record in self._records.get(digest, ()) for source in record.inputs.values()})

    @staticmethod
    def _walk(digests: Iterable[str], following: Callable[[str], list[str]]) -> list[str]:
        """Return a depth-first post-order. It ends even if forged records refer to each other in a cycle."""
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
                stack += [(other, False) for other in following(digest) if other not in done]
        return list(done)
