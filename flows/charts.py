"""Line charts as inline SVG: no script, coloured by the page's style sheet (light and dark), with their numbers beside.

Own drawing, not matplotlib's: importing that takes a second, which a rerun without computing must not cost, and its
pictures have one colour scheme.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

from markupsafe import Markup, escape

WIDTH, PANEL, LEFT, RIGHT, TOP, GAP, BOTTOM = 440, 190, 54, 14, 26, 20, 40
"""Of a drawing, in its own units; the page scales it. `PANEL` is the height of one panel's plot."""
MOST = 400
"""Points drawn of a curve; a longer one is thinned evenly, ends kept."""

Point = tuple[float, float]
T = TypeVar("T")


class Series(NamedTuple):
    """A curve, or points alone."""

    name: str
    points: Sequence[Point]
    style: str = "a"
    """A letter that the style sheet has a colour and dashes for."""
    line: bool = True
    dots: bool = False
    bars: Sequence[tuple[float, float]] = ()
    """Lower and upper end of each point's interval."""


class Rule(NamedTuple):
    """A level across the panel."""

    name: str
    level: float
    style: str
    band: tuple[float, float] | None = None
    """Drawn as an area instead."""


@dataclass(frozen=True)
class Panel:
    """One plot; panels of a chart share its x axis."""

    title: str
    """What is on the y axis, with its unit."""
    series: Sequence[Series]
    rules: Sequence[Rule] = ()
    zero: bool = False
    """Whether the y axis has to show 0."""


class Chart(NamedTuple):
    """A drawing, its legend, and its numbers."""

    svg: Markup
    legend: list[tuple[str, str]]
    """Style and name."""
    columns: list[str]
    rows: list[list[float | None]]
    note: str = ""


def chart(
    name: str, title: str, panels: Sequence[Panel], x_title: str, x_range: tuple[float, float] | None = None
) -> Chart | None:
    """Panels above each other on one x axis; None where there is no point to draw.

    Args:
        name: part of the ids in the page.
        title: what one sees, for those who don't.
        panels: from top to bottom.
        x_title: what is on the x axis.
        x_range: its ends; None takes the points'.
    """
    panels = [_thinned(panel) for panel in panels]
    points = [point for panel in panels for series in panel.series for point in series.points]
    if not points:
        return None
    x_low, x_high = x_range or _padded(min(x for x, _ in points), max(x for x, _ in points), 0.0)
    height = len(panels) * (TOP + PANEL) + (len(panels) - 1) * GAP + BOTTOM

    def x_at(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{escape(name)}-t {escape(name)}-d">',
        f'<title id="{escape(name)}-t">{escape(title)}</title>',
        f'<desc id="{escape(name)}-d">{escape(_described(panels, x_title))}</desc>',
    ]
    x_ticks = _ticks(x_low, x_high, whole=all(float(x).is_integer() for x, _ in points))
    for index, panel in enumerate(panels):
        parts.append(_panel(panel, index * (TOP + PANEL + GAP) + TOP, x_at, x_ticks))
    bottom = height - BOTTOM
    for tick in x_ticks:
        parts.append(f'<text class="n" x="{x_at(tick):.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(x_title)}</text>'
    )
    parts.append("</svg>")
    columns, rows = _numbers(panels, x_title)
    return Chart(Markup("".join(parts)), list(_legend(panels)), columns, rows)


def thin(points: Sequence[T], most: int = MOST) -> list[T]:
    """At most `most` of the points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _thinned(panel: Panel) -> Panel:
    finite = [
        series
        if series.bars
        else series._replace(points=thin([p for p in series.points if all(map(math.isfinite, p))]))
        for series in panel.series
    ]
    return replace(panel, series=finite)


def _panel(panel: Panel, top: float, x_at: Callable[[float], float], x_ticks: Iterable[float]) -> str:
    y_low, y_high = _extent(panel)

    def y_at(y: float) -> float:
        return top + PANEL - (y - y_low) / (y_high - y_low) * PANEL

    right = WIDTH - RIGHT
    parts = [f'<text class="y" x="4" y="{top - 10}">{escape(panel.title)}</text>']
    for tick in _ticks(y_low, y_high):
        y = y_at(tick)
        parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{right}"/>')
        parts.append(f'<text class="n" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [f'<path class="grid" d="M{x_at(tick):.1f},{top}V{top + PANEL}"/>' for tick in x_ticks]
    for rule in panel.rules:
        if rule.band is not None:
            low, high = y_at(rule.band[0]), y_at(rule.band[1])
            parts.append(
                f'<rect class="band" x="{LEFT}" y="{high:.1f}" width="{right - LEFT}" height="{low - high:.1f}"/>'
            )
        else:
            parts.append(f'<path class="rule {rule.style}" d="M{LEFT},{y_at(rule.level):.1f}H{right}"/>')
    for series in panel.series:
        at = [(x_at(x), y_at(y)) for x, y in series.points]
        if series.line and len(at) > 1:
            parts.append(f'<path class="line {series.style}" d="M{" ".join(f"{x:.1f},{y:.1f}" for x, y in at)}"/>')
        for (x, _), (low, high) in zip(at, series.bars, strict=False):
            parts.append(f'<path class="bar {series.style}" d="M{x:.1f},{y_at(low):.1f}V{y_at(high):.1f}"/>')
        if series.dots or len(at) == 1:
            parts += [f'<circle class="dot {series.style}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in at]
    return "".join(parts)


def _extent(panel: Panel) -> tuple[float, float]:
    values = [y for series in panel.series for _, y in series.points]
    values += [end for series in panel.series for bar in series.bars for end in bar]
    values += [end for rule in panel.rules for end in rule.band or (rule.level,)]
    values += [0.0] if panel.zero else []
    low, high = _padded(min(values, default=0.0), max(values, default=1.0), 0.05)
    return (0.0 if panel.zero and min(values, default=0.0) > -1e-3 else low), high


def _padded(low: float, high: float, share: float) -> tuple[float, float]:
    """A range with some room; a single value gets one around it."""
    if low == high:
        room = abs(low) * 0.1 or 1.0
        return low - room, high + room
    return low - (high - low) * share, high + (high - low) * share


def _ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Round numbers within a range: steps of 1, 2 or 5 times a power of ten; `whole` numbers alone."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(each * power for each in (1, 2, 5, 10) if each * power >= raw)
    step = max(step, 1.0) if whole else step
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _legend(panels: Sequence[Panel]) -> Iterable[tuple[str, str]]:
    kinds = {(True, False): "", (True, True): " dotted", (False, True): " only-dots", (False, False): " only-dots"}
    named = {each.name: each.style + kinds[each.line, each.dots] for panel in panels for each in panel.series}
    named |= {rule.name: "area" if rule.band else f"{rule.style} level" for panel in panels for rule in panel.rules}
    return ((style, name) for name, style in named.items())


def _numbers(panels: Sequence[Panel], x_title: str) -> tuple[list[str], list[list[float | None]]]:
    """The points as a table: a column for each series."""
    named = [series for panel in panels for series in panel.series]
    by_x: dict[float, list[float | None]] = {}
    for column, series in enumerate(named):
        for x, y in series.points:
            by_x.setdefault(x, [None] * len(named))[column] = y
    return [x_title, *(series.name for series in named)], [[x, *by_x[x]] for x in sorted(by_x)]


def _described(panels: Sequence[Panel], x_title: str) -> str:
    """From where to where each curve goes, and the levels beside it."""
    told = []
    for panel in panels:
        for series in panel.series:
            if series.points:
                (x0, y0), (x1, y1) = series.points[0], series.points[-1]
                told.append(f"{series.name} goes from {y0:.3g} at {x0:.4g} to {y1:.3g} at {x1:.4g} ({x_title}).")
        told += [f"{rule.name}." for rule in panel.rules]
    return " ".join([*told, "The numbers are in the table below."])


def interval_chart(name: str, title: str, series: Series, rules: Sequence[Rule]) -> Chart:
    """A share between 0 and 1 with its interval, lying, and the levels it is compared with.

    Args:
        name, title: as `chart`.
        series: one point whose x is the share, with one bar.
        rules: levels across.
    """

    def at(share: float) -> float:
        return 14 + share * (WIDTH - 28)

    ((value, _),), ((low, high),) = series.points, series.bars
    told = f"{series.name}: {value:.3g}, from {low:.3g} to {high:.3g}. " + " ".join(f"{rule.name}." for rule in rules)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} 84" role="img" aria-labelledby="{escape(name)}-t {escape(name)}-d">',
        f'<title id="{escape(name)}-t">{escape(title)}</title><desc id="{escape(name)}-d">{escape(told)}</desc>',
    ]
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<path class="grid" d="M{at(tick):.1f},8V58"/>')
        parts.append(f'<text class="n" x="{at(tick):.1f}" y="76" text-anchor="middle">{tick:g}</text>')
    parts += [f'<path class="rule {rule.style}" d="M{at(rule.level):.1f},8V58"/>' for rule in rules]
    parts.append(f'<path class="bar wide {series.style}" d="M{at(low):.1f},33H{at(high):.1f}"/>')
    parts.append(f'<circle class="dot {series.style}" cx="{at(value):.1f}" cy="33" r="6"/></svg>')
    legend = [(series.style, series.name), *((f"{rule.style} level", rule.name) for rule in rules)]
    return Chart(Markup("".join(parts)), legend, ["win rate", "lower end", "upper end"], [[value, low, high]])
