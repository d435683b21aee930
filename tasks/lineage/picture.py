"""Draw a graph of artifacts as one SVG, in layers from top to bottom: the inputs of an artifact come before it.

It is narrow, because MLflow shows a picture in its own width and cuts off what exceeds its column. It has its own
background and follows the reader's light or dark scheme, so it is readable on every page.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Literal, NamedTuple

from components.base.text import line, markdown

State = Literal["passed", "failed", "warned", "none"]

MOST = 40
"""The largest number of boxes in a picture; a larger graph would be unreadable."""
WIDTH = 148
"""Width of a box in pixels; a telephone fits two next to each other."""
GAP, SPACE, MARGIN = 40, 8, 8
"""In pixels: gap between layers, gap between boxes of a layer, and margin of the picture."""
TITLE, STEP, PADDING = 18, 16, 10
"""In pixels: heights of the title and of each further line, and the padding around them."""
LANE = 10
"""Space in pixels that an arrow takes in a layer that it passes."""
TITLE_EM, LINE_EM = 8.7, 6.8
"""Average width in pixels of a character in the title and in a line."""


class Box(NamedTuple):
    """An artifact, or an external input."""

    id: str
    title: str
    lines: tuple[str, ...] = ()
    verdict: str = ""
    """The verdict in a few words; shown as the last line."""
    state: State = "none"
    external: bool = False
    """True if no stage made it."""


class Diagram(NamedTuple):
    """The graph to draw."""

    boxes: Sequence[Box]
    arrows: Sequence[tuple[str, str]]
    """Pairs of box ids: an input, and what was made of it."""


class _Place(NamedTuple):
    x: float
    y: float
    width: float
    height: float


_Item = str | tuple[str, int]
"""A box's id, or the lane that all arrows from a box share in a layer that they pass."""


def told(graph: Diagram) -> str:
    """Return the graph as a sentence, for readers who can't see the picture."""
    titles = {box.id: line(box.title) for box in graph.boxes}
    made: dict[str, list[str]] = {}
    for before, after in graph.arrows:
        made.setdefault(after, []).append(titles[before])
    parts = []
    for box in graph.boxes:
        of = f" from {', '.join(made[box.id])}" if box.id in made else ""
        parts += [f"{titles[box.id]}{of}" + (f" ({line(box.verdict)})" if box.verdict else "")]
    return "; ".join(parts)


def draw(graph: Diagram) -> str:
    """Return the picture as SVG. Arrows to or from missing boxes are left out."""
    boxes = {box.id: box for box in graph.boxes}
    arrows = [arrow for arrow in dict.fromkeys(graph.arrows) if arrow[0] in boxes and arrow[1] in boxes]
    layers = _layers(list(boxes), arrows)
    height = 2 * PADDING + TITLE + STEP * max((len(_lines(box)) for box in boxes.values()), default=0)
    places, width, tall = _places(layers, height)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{tall:.0f}" '
        f'viewBox="0 0 {width:.0f} {tall:.0f}" role="img">',
        f"<title>{escape(told(Diagram(list(boxes.values()), arrows)))}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="page" width="{width:.0f}" height="{tall:.0f}" rx="8"/>',
    ]
    of = {id_: depth for depth, layer in enumerate(layers) for id_ in layer if isinstance(id_, str)}
    for before, after in arrows:
        lanes = [(before, depth) for depth in range(of[before] + 1, of[after])]
        passed: list[_Item] = [before, *lanes, after]
        points = [places[stop] for stop in passed]
        parts.append(f'<path class="arrow" marker-end="url(#head)" d="{_path(points)}"/>')
    parts += [_drawn(box, places[box.id]) for box in boxes.values()]
    return "\n".join([*parts, "</svg>\n"])


def in_html(graph: Diagram) -> str:
    """Return the picture as an HTML image with its content inside."""
    return f'<img src="{_address(graph)}" alt="{escape(f"Lineage: {told(graph)}")}">'


def in_markdown(graph: Diagram) -> str:
    """Return the picture as a Markdown image with its content inside."""
    return f"![Lineage: {markdown(told(graph))}]({_address(graph)})"


def _address(graph: Diagram) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(draw(graph).encode()).decode()}"


def _layers(ids: Sequence[str], arrows: Sequence[tuple[str, str]]) -> list[list[_Item]]:
    """Return the boxes by longest path from the inputs, an input just before its first reader, with few crossings."""
    depth = dict.fromkeys(ids, 0)
    for _ in ids:  # ends even with a cycle, which only a false record can contain
        for before, after in arrows:
            depth[after] = min(max(depth[after], depth[before] + 1), len(ids) - 1)
    ends = {after for _, after in arrows}
    for box in ids:
        readers = [depth[after] for before, after in arrows if before == box]
        if box not in ends and readers:
            depth[box] = max(0, min(readers) - 1)
    layers: list[list[_Item]] = [[] for _ in range(max(depth.values(), default=0) + 1)]
    for box in ids:
        layers[depth[box]].append(box)
    linked: list[tuple[_Item, _Item]] = []
    for before, after in arrows:
        lanes: list[_Item] = [(before, at) for at in range(depth[before] + 1, depth[after])]
        for at, lane in enumerate(lanes, depth[before] + 1):
            if lane not in layers[at]:
                layers[at].append(lane)
        linked += pairwise([before, *lanes, after])
    for downwards in (True, False, True, False):
        _order(layers, linked, downwards)
    return layers


def _order(layers: list[list[_Item]], linked: Sequence[tuple[_Item, _Item]], forward: bool) -> None:
    """Sort each layer by the mean position of its neighbours in the layer before (or after)."""
    walk = range(1, len(layers)) if forward else range(len(layers) - 2, -1, -1)
    for at in walk:
        positions = {item: place for place, item in enumerate(layers[at - 1 if forward else at + 1])}
        mean: dict[_Item, float] = {}
        for place, item in enumerate(layers[at]):
            ends = [a if forward else b for a, b in linked if (b if forward else a) == item]
            neighbours = [positions[end] for end in ends if end in positions]
            mean[item] = sum(neighbours) / len(neighbours) if neighbours else float(place)
        layers[at].sort(key=lambda item: mean[item])


def _places(layers: Sequence[Sequence[_Item]], height: float) -> tuple[dict[_Item, _Place], float, float]:
    sizes = [[WIDTH if isinstance(item, str) else LANE for item in layer] for layer in layers]
    widths = [sum(layer) + SPACE * (len(layer) - 1) for layer in sizes]
    widest = max(widths, default=0)
    places: dict[_Item, _Place] = {}
    for at, (layer, layer_sizes) in enumerate(zip(layers, sizes, strict=True)):
        x, y = MARGIN + (widest - widths[at]) / 2, MARGIN + at * (height + GAP)
        for item, size in zip(layer, layer_sizes, strict=True):
            places[item] = _Place(x, y, size, height)
            x += size + SPACE
    return places, 2 * MARGIN + widest, 2 * MARGIN + len(layers) * (height + GAP) - GAP


def _path(places: Sequence[_Place]) -> str:
    first = places[0]
    steps = [f"M{first.x + first.width / 2:.1f} {first.y + first.height:.1f}"]
    for before, after in pairwise(places):
        x, y, to_x, to_y = before.x + before.width / 2, before.y + before.height, after.x + after.width / 2, after.y
        middle = (y + to_y) / 2
        steps.append(f"C{x:.1f} {middle:.1f} {to_x:.1f} {middle:.1f} {to_x:.1f} {to_y:.1f}")
        if after is not places[-1]:
            steps.append(f"V{after.y + after.height:.1f}")
    return "".join(steps)


def _lines(box: Box) -> list[str]:
    return [*box.lines, *([box.verdict] if box.verdict else [])]


def _drawn(box: Box, place: _Place) -> str:
    kind = " external" if box.external else ""
    parts = [
        f'<g><rect class="box{kind} {box.state}" x="{place.x:.1f}" y="{place.y:.1f}" width="{place.width:.1f}" '
        f'height="{place.height:.1f}" rx="6"/>'
    ]
    x, y, room = place.x + PADDING, place.y + PADDING + TITLE - 5, place.width - 2 * PADDING
    parts.append(f'<text class="title" x="{x:.1f}" y="{y:.1f}">{_short(box.title, room / TITLE_EM)}</text>')
    for text in _lines(box):
        y += STEP
        kind = f"verdict {box.state}" if text is box.verdict else "line"
        parts.append(f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{_short(text, room / LINE_EM)}</text>')
    return "".join([*parts, "</g>"])


def _short(text: str, longest: float) -> str:
    text = line(text)
    return escape(text if len(text) <= longest else f"{text[: int(longest) - 1]}…")


def _colours(colours: Mapping[str, str]) -> str:
    return "".join(f".{name.replace(' ', '.')}{{{rule}}}" for name, rule in colours.items())


_STYLE = (
    "text{font-family:system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;font-size:12px}"
    ".title{font-size:13px;font-weight:600}.verdict{font-weight:600}"
    ".box{stroke-width:1.5}.external{stroke-dasharray:4 3}.arrow{fill:none;stroke-width:1.5}"
    + _colours({
        "page": "fill:#fff", "box": "fill:#f6f8fa;stroke:#8c959f", "title": "fill:#1b1f24", "line": "fill:#57606a",
        "verdict": "fill:#57606a", "verdict passed": "fill:#116329", "verdict failed": "fill:#a40e26",
        "verdict warned": "fill:#744500", "box failed": "stroke:#a40e26", "box warned": "stroke:#9a6700",
        "arrow": "stroke:#6e7781", "head": "fill:#6e7781",
    })
    + "@media (prefers-color-scheme:dark){"
    + _colours({
        "page": "fill:#0d1117", "box": "fill:#161b22;stroke:#6e7681", "title": "fill:#e6edf3", "line": "fill:#9da7b3",
        "verdict": "fill:#9da7b3", "verdict passed": "fill:#7ee787", "verdict failed": "fill:#ff9492",
        "verdict warned": "fill:#e3b341", "box failed": "stroke:#ff9492", "box warned": "stroke:#e3b341",
        "arrow": "stroke:#8b949e", "head": "fill:#8b949e",
    })
    + "}"
)  # fmt: skip
