"""Find what a run, model, artifact or file was made of, and what was made of it, for `tether lineage`."""

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.nested import flatten
from components.base.paths import user_path
from components.store.graph import Graph, Node
from components.store.records import Record
from components.store.store import ArtifactStore
from flows.config.run_config import default_values
from tasks.result import Input
from tasks.runs.journal import recorded_inputs
from tasks.runs.status import StageStatus, finite, gates_json, has_run, load_readable, load_status
from tasks.tracking.registry import Version, find_version, versions

JUDGED_BY = 20
"""The largest number of runs listed that judged an artifact, newest first."""


class Subject(NamedTuple):
    """What the question is about, resolved."""

    kind: str
    """`run`, `model`, `artifact` or `source`."""
    name: str
    digests: tuple[str, ...]
    run: str | None = None


class ChangedOption(NamedTuple):
    """An option that differs from the profile's."""

    value: JsonValue
    default: JsonValue


class Judging(NamedTuple):
    """A run that used an artifact, from its status."""

    run: str
    stage: StageStatus


@dataclass(frozen=True)
class LineageNode:
    """An artifact or an external input."""

    digest: str
    names: tuple[str, ...]
    """The input names under which other artifacts use it."""
    hub: str = ""
    """`owner/name@commit` if it is a copy of a hub dataset."""
    lost: str | None = None
    """If its record can't be read: why, and the command that would restore it."""
    record: Record | None = None
    """None if no stage made it, as far as is known."""
    options: Mapping[str, ChangedOption] = field(default_factory=dict)
    """Options that differ from the profile's, by dotted name."""
    runs: Sequence[Judging] = ()
    """The runs that used it, newest first."""
    models: Sequence[Version] = ()

    @property
    def source(self) -> str:
        """Return one sha256 of all code that the stage runs."""
        return digest_json(self.record.parts.get("source", {}) if self.record else {})

    def as_json(self) -> dict[str, object]:
        """Return the node as `tether lineage --json` prints it."""
        fields: dict[str, object] = {"digest": self.digest, "names": list(self.names), "stage": None}
        record = self.record
        if record is None:
            return fields | {name: text for name, text in (("hub", self.hub), ("lost", self.lost)) if text}
        return {
            **fields,
            **record.model_dump(include={"stage", "key", "run", "started", "seconds", "inputs"}),
            "seed": record.job.get("seed"),
            "options": {name: option._asdict() for name, option in self.options.items()},
            "code": record.environment.get("code"),
            "source": self.source,
            "libraries": record.parts.get("libraries", {}),
            "environment": record.machine,
            "metrics": finite(record.metrics),
            "judged": [
                {
                    "run": run,
                    "state": stage.state,
                    "user": stage.user,
                    "gates": gates_json(stage.gates),
                    "waivers": [waiver.model_dump() for waiver in stage.waivers],
                }
                for run, stage in self.runs
            ],
            "models": [
                {
                    **{name: getattr(model, name) for name in ("name", "version", "promoted", "life")},
                    "aliases": list(model.aliases),
                }
                for model in self.models
            ],
        }


class LineageEdge(NamedTuple):
    """The artifact `to` was made of `made_of`, under the input name `name`."""

    made_of: str
    to: str
    name: str


class LineageGraph(NamedTuple):
    """What something was made of, or what was made of it."""

    subject: Subject
    downstream: bool
    nodes: list[LineageNode]
    """In the order in which they were made."""
    edges: list[LineageEdge]
    unreadable: dict[str, str]
    """Maps a key to what is wrong with its record. Nodes that depend on it may be missing here."""

    def as_json(self) -> dict[str, object]:
        """Return what `tether lineage --json` prints."""
        return {
            "subject": {"kind": self.subject.kind, "name": self.subject.name, "digests": self.subject.digests},
            "direction": "downstream" if self.downstream else "upstream",
            "nodes": [node.as_json() for node in self.nodes],
            "edges": [{"from": edge.made_of, "to": edge.to, "name": edge.name} for edge in self.edges],
            "unreadable": [{"key": key, "reason": reason} for key, reason in self.unreadable.items()],
        }


def lineage(home: Path, spelling: str, downstream: bool = False) -> LineageGraph:
    """Return the graph upstream (or downstream) of what `spelling` names.

    Args:
        home: the Tether home.
        spelling: a run's id, a model (`tether-policy`, `tether-policy@champion`, `tether-policy/3`), the start of an
            artifact's digest or key, or a file or folder that runs have read.
        downstream: return what was made of it instead of what it was made of.

    Raises:
        UserError: nothing with that name is known.
    """
    graph = Graph.of(ArtifactStore(home))
    subject = find_subject(home, spelling, graph)
    if subject.run and not downstream:
        graph = graph.of_keys(load_status(home, subject.run).results)
    nodes = graph.downstream(subject.digests) if downstream else graph.upstream(subject.digests)
    digests = {node.digest for node in nodes}
    statuses = load_readable(home)[0]
    profiles = {status.run: status.profile for status in statuses}
    judging: dict[str | None, list[Judging]] = defaultdict(list)
    registered: dict[str, list[Version]] = defaultdict(list)
    for status in statuses:
        for stage in status.stages:
            judging[stage.digest].append(Judging(status.run, stage))
    computed_by = {record.run for node in nodes for record in node.records}
    read = recorded_inputs(home, computed_by | ({subject.run} if subject.run else set()))
    for version in versions(home):
        registered[version.digest].append(version)

    def described(node: Node) -> LineageNode:
        uses = judging[node.digest]
        if node.records:
            record = record_of(node, subject.run)
            options = changed_options(home, record, profiles.get(record.run))
            of, named = uses[:JUDGED_BY], registered[node.digest]
            return LineageNode(node.digest, node.names, "", None, record, options, of, named)
        taken = next((use for use in uses if use.run == subject.run), uses[-1] if uses else None)
        hub = read[node.digest].hub if node.digest in read else ""
        return LineageNode(node.digest, node.names, hub, _lost(taken, graph) if taken else None)

    return LineageGraph(
        subject=subject,
        downstream=downstream,
        nodes=[described(node) for node in nodes],
        edges=[
            LineageEdge(digest, node.digest, name)
            for node in nodes
            for name, digest in graph.inputs(node.digest).items()
            if digest in digests
        ],
        unreadable={key: miss.reason for key, miss in sorted(graph.unreadable.items())},
    )


def find_subject(home: Path, name: str, graph: Graph) -> Subject:
    """Return the run, model, artifact or file called `name`. Raises UserError if nothing with that name is known."""
    if has_run(home, name):
        digests = tuple(stage.digest for stage in load_status(home, name).stages if stage.digest)
        return Subject("run", name, digests, name)
    if model := find_version(home, name):
        return Subject("model", f"{model.name}/{model.version}", (model.digest,))
    if digest := graph.find(name):
        kind = "artifact" if graph.node(digest).records else "source"
        return Subject(kind, digest[:16], (digest,))
    path = user_path(name, "lineage")
    if path.exists():
        digest = Input.named(path).digest
        if not graph.node(digest).names:
            raise UserError(f"{name}: no run here has read its current content (sha256 {digest[:16]}).")
        return Subject("source", str(path), (digest,))
    raise UserError(
        f"{name}: there is no such run, model, artifact or file. Give a run's id (`tether status`), a registered "
        f"model (such as tether-policy@champion), six or more digits of a digest (`tether store ls`), or a data file."
    )


def record_of(node: Node, run: str | None) -> Record:
    """Return the record of an artifact that `run` computed, or the newest one. If one was computed in this home,
    imported ones do not count."""
    records = [record for record in node.records if not record.imported] or node.records
    return next((record for record in records if record.run == run), records[0])


def _lost(taken: Judging, graph: Graph) -> str:
    """Return why an artifact that a run used has no record, and the command that would restore it."""
    key, stage = taken.stage.key or "", taken.stage.name
    reason = graph.unreadable[key].reason if key in graph.unreadable else "the store no longer has its record"
    return f"{stage} of run {taken.run}, key {key[:16]}: {reason}. `tether rerun {stage} --from {taken.run}`"


def changed_options(home: Path, record: Record, profile: str | None) -> dict[str, ChangedOption]:
    """Return the options of a record's job that differ from the profile of the run that computed it, by dotted name.

    Empty if `profile` is None. Raises UserError as `default_values`.
    """
    if profile is None:
        return {}
    defaults = _defaults(home, record.run, profile)
    return {
        name: ChangedOption(value, defaults[name])
        for name, value in flatten(record.job).items()
        if name in defaults and not name.startswith("runtime.") and value != defaults[name]
    }


@functools.lru_cache(maxsize=64)
def _defaults(home: Path, run: str, profile: str) -> dict[str, JsonValue]:
    return flatten(default_values(home, run, profile)[1])
