"""Draw a graph of artifacts as one SVG: a column of boxes, inputs first, with arrows beside it.

It is narrow, because MLflow shows a picture in its own width and cuts off what exceeds its column. It has its own
background and follows the reader's light or dark scheme, so it is readable on every page.
"""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple

from components.base.text import line, markdown

State = Literal["passed", "failed", "warned", "none"]

MOST = 40
"""The largest number of boxes in a picture; a larger graph would be unreadable."""
WIDTH, ROOM = 230, 110
"""Widths in pixels of a box, and of the room beside it for arrows; a telephone fits both."""
GAP, MARGIN = 26, 8
"""In pixels: gap between boxes, and margin of the picture."""
TITLE, STEP, PADDING = 18, 16, 10
"""In pixels: heights of the title and of each further line, and the padding around them."""
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
    """Return the picture as SVG, with the boxes in their order. Arrows to or from missing boxes are left out."""
    boxes = {box.id: box for box in graph.boxes}
    arrows = [arrow for arrow in dict.fromkeys(graph.arrows) if arrow[0] in boxes and arrow[1] in boxes]
    places: dict[str, tuple[float, float]] = {}
    """The top of each box, and its height."""
    y = float(MARGIN)
    for box in boxes.values():
        places[box.id] = y, 2 * PADDING + TITLE + STEP * len(_lines(box))
        y += places[box.id][1] + GAP
    width, tall = 2 * MARGIN + WIDTH + ROOM, max(y - GAP, 0) + MARGIN
    order = list(boxes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{tall:.0f}" '
        f'viewBox="0 0 {width} {tall:.0f}" role="img">',
        f"<title>{escape(told(Diagram(list(boxes.values()), arrows)))}</title>",
        f"<style>{_STYLE}</style>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        f'<rect class="page" width="{width}" height="{tall:.0f}" rx="8"/>',
    ]
    for before, after in arrows:
        span = order.index(after) - order.index(before)
        path = _path(places[before], places[after], span, len(order))
        parts.append(f'<path class="arrow" marker-end="url(#head)" d="{path}"/>')
    parts += [_drawn(box, *places[box.id]) for box in boxes.values()]
    return "\n".join([*parts, "</svg>\n"])


def _path(before: tuple[float, float], after: tuple[float, float], span: int, count: int) -> str:
    """Return the way of an arrow: down to the next box, or around the boxes between, the further the longer it is."""
    right, top = MARGIN + WIDTH, after[0]
    if span == 1:
        return f"M{MARGIN + WIDTH / 2:.1f} {before[0] + before[1]:.1f}V{top:.1f}"
    begin, end = before[0] + 0.7 * before[1], top + 0.3 * after[1]
    side = right + 4 / 3 * ROOM * (0.3 + 0.7 * abs(span) / count)  # a curve comes three quarters of the way to there
    return f"M{right} {begin:.1f}C{side:.1f} {begin:.1f} {side:.1f} {end:.1f} {right} {end:.1f}"


def in_html(graph: Diagram) -> str:
    """Return the picture as an HTML image with its content inside."""
    return f'<img src="{_address(graph)}" alt="{escape(f"Lineage: {told(graph)}")}">'


def in_markdown(graph: Diagram) -> str:
    """Return the picture as a Markdown image with its content inside."""
    return f"![Lineage: {markdown(told(graph))}]({_address(graph)})"


def _address(graph: Diagram) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(draw(graph).encode()).decode()}"


def _lines(box: Box) -> list[str]:
    return [*box.lines, *([box.verdict] if box.verdict else [])]


def _drawn(box: Box, top: float, height: float) -> str:
    kind = " external" if box.external else ""
    parts = [
        f'<g><rect class="box{kind} {box.state}" x="{MARGIN}" y="{top:.1f}" width="{WIDTH}" height="{height}" rx="6"/>'
    ]
    x, y, room = MARGIN + PADDING, top + PADDING + TITLE - 5, WIDTH - 2 * PADDING
    parts.append(f'<text class="title" x="{x}" y="{y:.1f}">{_short(box.title, room / TITLE_EM)}</text>')
    for text in _lines(box):
        y += STEP
        kind = f"verdict {box.state}" if text is box.verdict else "line"
        parts.append(f'<text class="{kind}" x="{x}" y="{y:.1f}">{_short(text, room / LINE_EM)}</text>')
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
