"""What a run, model, artifact or file was made of, and what was made of it: facts for `tether lineage`."""

import functools
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from components.artifacts import ArtifactStore
from components.canonical import digest_json
from components.errors import UserError
from components.store_graph import Graph, Node
from components.store_record import Record
from flows.config import default_values
from tasks import journal
from tasks.recording import flatten
from tasks.registry import Version, find_version, versions_of
from tasks.result import Source
from tasks.status import load_status, load_statuses

JUDGED_BY = 20
"""Runs that are named of those that judged an artifact, the newest."""


class Subject(NamedTuple):
    """What the question is about."""

    kind: str
    """run, model, artifact, or source."""
    name: str
    digests: tuple[str, ...]
    run: str | None = None


def lineage(home: Path, asked: str, downstream: bool = False) -> dict[str, Any]:
    """The graph upstream (or downstream) of what is asked for, as JSON.

    Args:
        home: the `TETHER_HOME`.
        asked: a run's id, a model (`tether-policy`, `tether-policy@champion`, `tether-policy/3`), the beginning of an
            artifact's digest or key, or a file or folder that runs have read.
        downstream: what was made of it instead of what it was made of.

    Returns:
        `{subject, direction, nodes, edges, unreadable}`; nodes in the order in which they were made, each as `_node`
        says; an edge is `{from, to, name}`: the artifact `to` was made of `from`, which it calls `name`; `unreadable`
        is the store's keys whose record is damaged, `{key, reason}` each: what they are part of may be missing here.

    Raises:
        UserError: nothing of that name is known.
    """
    with uncollected():
        return _lineage(home, asked, downstream)


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the collector, which goes through the same thousands of records again and again, half of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _lineage(home: Path, asked: str, downstream: bool) -> dict[str, Any]:
    store = ArtifactStore(home)
    graph = Graph.of(store)
    named = find_version(home, asked)
    subject = find_subject(home, asked, graph, [named] if named else [])
    if subject.run and not downstream:
        graph = graph.of_keys(keys_of(home, subject.run))
    nodes = graph.downstream(subject.digests) if downstream else graph.upstream(subject.digests)
    shown = {node.digest for node in nodes}
    runs = _runs(home)
    by_digest: dict[str, list[Version]] = {}
    for version in versions_of(home, shown):
        by_digest.setdefault(version.digest, []).append(version)
    return {
        "subject": {"kind": subject.kind, "name": subject.name, "digests": list(subject.digests)},
        "direction": "downstream" if downstream else "upstream",
        "nodes": [_node(node, home, runs, by_digest, subject.run, graph) for node in nodes],
        "edges": [
            {"from": digest, "to": node.digest, "name": name}
            for node in nodes
            for name, digest in graph.inputs(node.digest).items()
            if digest in shown
        ],
        "unreadable": [{"key": key, "reason": miss.reason} for key, miss in sorted(graph.unreadable.items())],
    }


def keys_of(home: Path, run: str) -> set[str]:
    """The keys of the stages of a run."""
    return {stage["key"] for stage in load_status(home, run)["stages"]}


def find_subject(home: Path, asked: str, graph: Graph, registered: Iterable[Version]) -> Subject:
    """What `asked` names. Raises `UserError` if it names nothing that is known."""
    if (home / "runs" / asked / "run.json").is_file():
        digests = tuple(stage["digest"] for stage in load_status(home, asked)["stages"] if stage["digest"])
        return Subject("run", asked, digests, asked)
    model = next((each for each in _newest_first(registered) if asked in each.spellings), None)
    if model is not None:
        return Subject("model", f"{model.name}/{model.version}", (model.digest,))
    if digest := graph.find(asked):
        kind = "artifact" if graph.node(digest).records else "source"
        return Subject(kind, digest[:16], (digest,))
    path = Path(asked).expanduser()
    if path.exists():
        digest = Source.of(path).digest
        if not graph.node(digest).names:
            raise UserError(f"{asked}: no run here has read it as it is now (sha256 {digest[:16]}).")
        return Subject("source", str(path), (digest,))
    raise UserError(
        f"{asked}: there is no such run, model, artifact or file. Give a run's id (`tether status`), a registered "
        f"model (as tether-policy@champion), six or more digits of a digest (`tether store ls`), or a data file."
    )


def _newest_first(registered: Iterable[Version]) -> list[Version]:
    return sorted(registered, key=lambda each: (each.name, -int(each.version)))


class _Judging(NamedTuple):
    """A run that took an artifact, as its status says."""

    run: str
    stage: Mapping[str, Any]


class _Runs(NamedTuple):
    """What the runs of a home say."""

    judging: dict[str, list[_Judging]]
    """Artifact's digest to the runs that took it, the newest first."""
    profiles: dict[str, str]
    """Run to the profile that it is called after."""


def _runs(home: Path) -> _Runs:
    found = _Runs({}, {})
    for status in load_statuses(home):
        found.profiles[status["run"]] = status["profile"]
        for stage in status["stages"]:
            if stage["digest"]:
                found.judging.setdefault(stage["digest"], []).append(_Judging(status["run"], stage))
    return found


def _node(
    node: Node, home: Path, runs: _Runs, registered: Mapping[str, Sequence[Version]], run: str | None, graph: Graph
) -> dict[str, Any]:
    """What is known of an artifact: `{digest, names, stage}`, and where a stage made it `key, run, started, seconds,
    seed, options, code, source, libraries, environment, inputs, metrics, judged, models`. Where runs took it from a
    stage but how it was made can't be read any more, `stage` is None and `lost` says so.

    `options` are those that differ from the profile's, each with both values; `source` is one sha256 of all the code
    that the stage runs; `judged` are the runs that took it, with gates and waivers; `models` its registered versions.
    """
    took = runs.judging.get(node.digest, [])
    if not node.records:
        known = {"digest": node.digest, "names": list(node.names), "stage": None}
        return {**known, "lost": _lost(next((t for t in took if t.run == run), took[-1]), graph)} if took else known
    record = next((each for each in node.records if each.run == run), node.records[0])
    return {
        "digest": node.digest,
        "names": list(node.names),
        "stage": record.stage,
        "key": record.key,
        "run": record.run,
        "started": record.started,
        "seconds": record.seconds,
        "seed": record.job.get("seed"),
        "options": changed_options(record, runs.profiles.get(record.run)),
        "code": record.environment.get("code"),
        "source": digest_json(record.parts.get("source", {})),
        "libraries": record.parts.get("libraries", {}),
        "environment": {name: value for name, value in record.environment.items() if name != "code"},
        "inputs": record.inputs,
        "metrics": {name: value if abs(value) < float("inf") else None for name, value in record.metrics.items()},
        "judged": [_judged(home, each) for each in took[:JUDGED_BY]],
        "models": [
            {
                "name": each.name,
                "version": each.version,
                "aliases": list(each.aliases),
                "promoted": each.promoted,
                "life": each.life,
            }
            for each in registered.get(node.digest, ())
        ],
    }


def _lost(taken: _Judging, graph: Graph) -> str:
    """Why an artifact that a run took has no record, and what would give it one."""
    key, stage = taken.stage["key"], taken.stage["name"]
    reason = graph.unreadable[key].reason if key in graph.unreadable else "the store no longer has its record"
    return f"{stage} of run {taken.run}, key {key[:16]}: {reason}. `tether rerun {stage} --from {taken.run}`"


def changed_options(record: Record, profile: str | None) -> dict[str, Any]:
    """Options of the record's job that differ from those of the profile of the run that computed it.

    `{dotted name: {"value": ..., "default": ...}}`, with the classes' defaults where the profile is none of ours; empty
    where that run isn't here.
    """
    if profile is None:
        return {}
    defaults = _defaults(profile)
    return {
        name: {"value": value, "default": defaults[name]}
        for name, value in flatten(record.job).items()
        if name in defaults and not name.startswith("runtime.") and value != defaults[name]
    }


@functools.cache
def _defaults(profile: str) -> dict[str, Any]:
    return flatten(default_values(profile)[1])


def _judged(home: Path, each: _Judging) -> dict[str, Any]:
    """A run that took an artifact: its gates there, and of waived ones who waived them and why."""
    waivers = [
        {"gate": verdict["name"], "user": verdict["user"], "reason": verdict["reason"]}
        for fact in (journal.read_facts(home / "runs" / each.run) if _is_waived(each.stage) else ())
        if fact["kind"] == "record" and fact["done"]["digest"] == each.stage["digest"]
        for verdict in fact["done"]["verdicts"]
        if verdict["waived"]
    ]
    return {"run": each.run, "state": each.stage["state"], "gates": each.stage["gates"], "waivers": waivers}


def _is_waived(stage: Mapping[str, Any]) -> bool:
    return any(gate["waived"] for gate in stage["gates"])
