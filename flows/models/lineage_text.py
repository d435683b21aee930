"""Print a lineage: as text for the terminal, or as one HTML page."""

import json
from collections.abc import Iterator

from components.base.text import line
from components.gates.gate_text import number
from flows.models.lineage import LineageGraph, LineageNode
from flows.reports.run_facts import code_name
from flows.reports.terminal import model_votes_note
from tasks.lineage.of_run import DIGITS, TITLES, verdict_in_short
from tasks.lineage.picture import MOST, Box, Diagram


def text(lineage: LineageGraph) -> str:
    """Return each artifact, what it was made of and how it was judged, in the order in which they were made."""
    subject = lineage.subject
    towards = "went into" if lineage.downstream else "made of"
    lines = [f"{subject.kind} {line(subject.name)} {towards}, in the order in which they were made:"]
    for node in lineage.nodes:
        lines += ["", title(node), *(f"  {fact}" for fact in facts(node))]
    return "\n".join([*lines, *(["", note] if (note := incomplete(lineage)) else [])])


def incomplete(lineage: LineageGraph) -> str:
    """Return a sentence that the lineage may be incomplete, if records in the store are damaged; otherwise nothing."""
    if not lineage.unreadable:
        return ""
    named = line("; ".join(f"{key[:16]}: {reason}" for key, reason in lineage.unreadable.items()))
    return f"This may be incomplete: records in the store can't be read ({named}). See `tether store verify`."


def title(node: LineageNode) -> str:
    """Return a heading for an artifact: its stage or names, and its digest."""
    what = node.record.stage if node.record else ", ".join(node.names) or "source"
    return f"{line(what)}  {line(node.digest[:16])}"


def facts(node: LineageNode) -> Iterator[str]:
    """Yield the facts of an artifact, one per line. A line with two leading spaces belongs to the line above."""
    for fact in _facts(node):
        yield f"{'  ' if fact.startswith('  ') else ''}{line(fact)}"


def _facts(node: LineageNode) -> Iterator[str]:
    if (record := node.record) is None:
        yield node.lost or (f"a copy of the hub dataset {node.hub}" if node.hub else "no stage made it")
        return
    if record.imported:
        yield f"imported {record.imported}: the following comes from another home"
    if record.inputs:
        yield "made of " + ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(record.inputs.items()))
    yield f"computed by run {record.run}, {record.started}, in {record.seconds:.1f} s; seed {record.job.get('seed')}"
    libraries = ", ".join(f"{name} {version}" for name, version in record.parts.get("libraries", {}).items())
    yield f"code {code_name(record.environment.get('code', {}))} (source {node.source[:12]}); {libraries}"
    if voted := model_votes_note(record.metrics):
        yield voted
    for name, option in node.options.items():
        yield f"option {name} = {json.dumps(option.value)} (the profile has {json.dumps(option.default)})"
    for run, stage in node.runs:
        gates = [gate for gate in stage.gates if gate.threshold is not None]
        passed = sum(gate.passed for gate in gates)
        by = f" by {stage.user}" if stage.user else ""
        yield f"in run {run}{by}: {stage.state}" + (f", {passed} of {len(gates)} gates passed" if gates else "")
        for gate in gates:
            if not gate.passed:
                yield f"  {gate.name}: {gate.metric} is {number(gate.value)}, {'waived' if gate.waived else 'failed'}"
        for waiver in stage.waivers:
            yield f"  {waiver.gate} waived by {waiver.user}: {waiver.reason}"
    for model in node.models:
        aliases = f" ({', '.join(model.aliases)})" if model.aliases else ""
        yield f"registered as {model.name} version {model.version}{aliases}"
        yield from (f"  {line.removeprefix('- ').replace('**', '')}" for line in model.life)


def graph(lineage: LineageGraph) -> Diagram:
    """Return the graph as boxes and arrows."""
    boxes = [_box(node, lineage.subject.run) for node in lineage.nodes]
    return Diagram(boxes, [(edge.made_of, edge.to) for edge in lineage.edges])


def _box(node: LineageNode, run: str | None) -> Box:
    """Return the box of an artifact, with the verdict of `run`'s gates, or of the newest run that used it."""
    if node.record is None:
        title = ", ".join(node.names).replace("_", " ") or "source"
        return Box(node.digest, title, (node.digest[:DIGITS],), "lost" if node.lost else "", external=True)
    stage = node.record.stage
    took = next((use for use in node.runs if use.run == run), next(iter(node.runs), None))
    verdict, state = verdict_in_short(took.stage.gates) if took else ("", "none")
    models = [f"version {version.version}" for version in node.models[:1]]
    whole, _, part = stage.partition(".")
    title = TITLES.get(whole, whole).replace("_", " ")
    return Box(node.digest, title, (*([part] if part else []), *models, node.digest[:DIGITS]), verdict, state)


def page(lineage: LineageGraph) -> str:
    """Return one HTML page that needs no network: a picture of a small graph, and the artifacts in the order in which
    they were made, with links to what each was made of."""
    from flows.reports.page import rendered  # loads Jinja

    return rendered(
        "lineage.html",
        name=line(f"{lineage.subject.kind} {lineage.subject.name}"),
        towards="what was made of it" if lineage.downstream else "what it was made of",
        nodes=lineage.nodes,
        edges={node.digest: [edge for edge in lineage.edges if edge.to == node.digest] for node in lineage.nodes},
        picture=graph(lineage) if len(lineage.nodes) <= MOST else None,
        title=title,
        lines=facts,
        note=incomplete(lineage),
    )
