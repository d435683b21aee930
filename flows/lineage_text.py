"""A lineage for people: in the terminal, as a Mermaid graph, as one page of HTML."""

import html
import json
from collections.abc import Iterator, Mapping
from typing import Any

from flows.report import number


def text(found: Mapping[str, Any]) -> str:
    """Every artifact with what it was made of and how it was judged, in the order in which they were made."""
    subject = found["subject"]
    towards = "made of" if found["direction"] == "upstream" else "went into"
    lines = [f"{subject['kind']} {subject['name']} {towards}, in the order of making:"]
    inputs = _inputs(found)
    for node in found["nodes"]:
        lines += ["", title(node), *(f"  {line}" for line in facts(node, inputs.get(node["digest"], {})))]
    return "\n".join([*lines, *(["", note] if (note := incomplete(found)) else [])])


def incomplete(found: Mapping[str, Any]) -> str:
    """What to say where records of the store are damaged: an answer that may lack something has to say so."""
    if not found["unreadable"]:
        return ""
    named = "; ".join(f"{each['key'][:16]}: {each['reason']}" for each in found["unreadable"])
    return f"This may not be all: records of the store can't be read ({named}). See `tether store verify`."


def title(node: Mapping[str, Any]) -> str:
    """One line for an artifact."""
    what = node["stage"] or ", ".join(node["names"]) or "source"
    return f"{what}  {node['digest'][:16]}"


def facts(node: Mapping[str, Any], inputs: Mapping[str, str]) -> Iterator[str]:
    """What there is to say of an artifact, a line each."""
    if node["stage"] is None:
        yield node.get("lost", "no stage made it")
        return
    if inputs:
        yield "made of " + ", ".join(f"{name} {digest[:12]}" for name, digest in sorted(inputs.items()))
    yield f"computed by run {node['run']}, {node['started']}, in {node['seconds']:.1f} s; seed {node['seed']}"
    yield f"code {_code(node)}; {', '.join(f'{name} {version}' for name, version in node['libraries'].items())}"
    for name, option in node["options"].items():
        yield f"option {name} = {json.dumps(option['value'])} (the profile has {json.dumps(option['default'])})"
    for judged in node["judged"]:
        gates = [gate for gate in judged["gates"] if gate["threshold"] is not None]
        passed = sum(gate["passed"] for gate in gates)
        yield f"in run {judged['run']}: {judged['state']}" + (
            f", {passed} of {len(gates)} gates passed" if gates else ""
        )
        for gate in gates:
            if not gate["passed"]:
                yield f"  {gate['name']}: {gate['metric']} is {number(gate['value'])}" + (
                    ", waived" if gate["waived"] else ", failed"
                )
        for waiver in judged["waivers"]:
            yield f"  {waiver['gate']} waived by {waiver['user']}: {waiver['reason']}"
    for model in node["models"]:
        aliases = f" ({', '.join(model['aliases'])})" if model["aliases"] else ""
        yield f"registered as {model['name']} version {model['version']}{aliases}"
        yield from (f"  {line.removeprefix('- ').replace('**', '')}" for line in model["life"])


def mermaid(found: Mapping[str, Any]) -> str:
    """The graph as Mermaid draws it (https://mermaid.js.org/syntax/flowchart.html)."""
    lines = ["flowchart LR"]
    for node in found["nodes"]:
        open_, close = ("[", "]") if node["stage"] else ("[(", ")]")
        shown = title(node).replace('"', "#quot;").replace("  ", "<br/>")
        lines.append(f'    {_id(node["digest"])}{open_}"{shown}"{close}')
    for edge in found["edges"]:
        lines.append(f"    {_id(edge['from'])} -->|{edge['name']}| {_id(edge['to'])}")
    return "\n".join(lines)


COLUMN, ROW, WIDTH, HEIGHT, BEND = 230, 76, 190, 48, 36
"""Pixels of the drawing: from column to column, row to row, a box, and an arc's depth for each box that it passes."""


def page(found: Mapping[str, Any]) -> str:
    """One page that needs no network: the graph drawn, then the facts of each artifact."""
    subject, inputs = found["subject"], _inputs(found)
    name = f"{subject['kind']} {subject['name']}"
    towards = "what it was made of" if found["direction"] == "upstream" else "what was made of it"
    parts = [
        "<!doctype html>", '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(name)}: {towards}</title>", f"<style>{_STYLE}</style></head><body><main>",
        f"<h1>{html.escape(name)}: {towards}</h1>",
        f'<div class="graph" tabindex="0" role="region" aria-label="Graph">{_drawing(found)}</div>',
    ]  # fmt: skip
    for node in found["nodes"]:
        lines = "".join(f"<li>{html.escape(line.strip())}</li>" for line in facts(node, inputs.get(node["digest"], {})))
        parts.append(f'<section id="{node["digest"]}"><h2>{html.escape(title(node))}</h2><ul>{lines}</ul></section>')
    if note := incomplete(found):
        parts.append(f'<p role="note">{html.escape(note)}</p>')
    return "\n".join([*parts, "</main></body></html>"])


_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0; color: #1b1f24; background: #fff }
main { max-width: 72rem; margin: 0 auto; padding: 1rem }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } h2 { font-size: 1.05rem; margin: 1.5rem 0 .25rem }
ul { margin: 0; padding-left: 1.2rem } li { overflow-wrap: anywhere }
.graph { overflow-x: auto; border: 1px solid #8c959f; border-radius: 6px }
svg text { font: 13px system-ui, sans-serif; fill: #1b1f24 } svg .small { font-size: 11px; fill: #424a53 }
svg rect { fill: #eef4fb; stroke: #34659b } svg .source { fill: #f4f1e8; stroke: #7a6a2f }
svg .edge { stroke: #57606a; fill: none } svg .tip { fill: #57606a }
"""


def _drawing(found: Mapping[str, Any]) -> str:
    """Boxes in columns: each to the right of all that it was made of."""
    column: dict[str, int] = {}
    for node in found["nodes"]:  # in the order of making
        before = [column[edge["from"]] for edge in found["edges"] if edge["to"] == node["digest"]]
        column[node["digest"]] = max(before, default=-1) + 1
    for node in found["nodes"]:
        readers = [column[edge["to"]] for edge in found["edges"] if edge["from"] == node["digest"]]
        if node["stage"] is None and readers:  # what no stage made stands before the first that reads it
            column[node["digest"]] = max(0, min(readers) - 1)
    filled: dict[int, int] = {}
    at: dict[str, tuple[int, int]] = {}
    for digest, number_ in column.items():
        row = filled.get(number_, 0)
        filled[number_] = row + 1
        at[digest] = (10 + number_ * COLUMN, 10 + row * ROW)
    longest = max((column[edge["to"]] - column[edge["from"]] for edge in found["edges"]), default=1)
    width, height = 10 + len(filled) * COLUMN, 10 + max(filled.values(), default=1) * ROW + (longest - 1) * BEND
    parts = [f'<svg width="{width}" height="{height}" role="img" aria-label="What was made of what">', "<defs>"]
    parts.append('<marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">')
    parts.append('<path d="M0,0 L8,4 L0,8 z" class="tip"/></marker></defs>')
    for edge in found["edges"]:
        (x1, y1), (x2, y2) = at[edge["from"]], at[edge["to"]]
        beyond = column[edge["to"]] - column[edge["from"]] - 1
        if beyond:  # around the boxes between the two, below them
            x1, x2, y1, y2 = x1 + WIDTH * 3 // 5, x2 + WIDTH * 2 // 5, y1 + HEIGHT, y2 + HEIGHT
            way = f"M{x1},{y1} C{x1},{y1 + beyond * BEND + 20} {x2},{y2 + beyond * BEND + 20} {x2},{y2}"
        else:
            way = f"M{x1 + WIDTH},{y1 + HEIGHT // 2} L{x2},{y2 + HEIGHT // 2}"
        parts.append(
            f'<path class="edge" d="{way}" marker-end="url(#tip)"><title>{html.escape(edge["name"])}</title></path>'
        )
    for node in found["nodes"]:
        x, y = at[node["digest"]]
        kind = "" if node["stage"] else ' class="source"'
        what, _, digest = title(node).partition("  ")
        box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5"{kind}/>'
        name = f'<text x="{x + 10}" y="{y + 20}">{html.escape(what[:26])}</text>'
        small = f'<text class="small" x="{x + 10}" y="{y + 38}">{digest}</text>'
        parts.append(f'<a href="#{node["digest"]}">{box}{name}{small}</a>')
    return "".join([*parts, "</svg>"])


def _inputs(found: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    inputs: dict[str, dict[str, str]] = {}
    for node in found["nodes"]:
        inputs[node["digest"]] = dict(node.get("inputs", {}))
    return inputs


def _code(node: Mapping[str, Any]) -> str:
    code = node["code"] or {}
    commit = (code.get("commit") or "")[:12] or "of unknown commit"
    return f"{commit}{' with changes' if code.get('dirty') else ''} (source {node['source'][:12]})"


def _id(digest: str) -> str:
    return f"n{digest[:12]}"
