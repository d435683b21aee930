"""Draw charts in one style: lines, levels, intervals and legends."""

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

Curve = Sequence[tuple[float, float]]
T = TypeVar("T")

BLUE, RED, ORANGE, PURPLE, GREY = "#2f81d6", "#db4c40", "#b87514", "#9a66e0", "#767d87"
STYLE = {
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "grid.color", "xtick.color", "ytick.color"), GREY
    ),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "font.size": 9.0,
    "text.parse_math": False,  # a slice may be called "$"
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.fontsize": 9.0,
    "svg.fonttype": "none",  # keep text as text: small files, and the reader's fonts have every script
    "svg.hashsalt": "tether",
}
WIDTH = 4.0
"""Width of a chart in inches. On a telephone (358 pixels wide) its 9-point labels then have 11 pixels."""
MOST = 400
"""The largest number of points drawn per curve; a longer curve is thinned evenly and keeps its ends."""
LONGEST = 28
"""The largest number of characters shown of a name from the data."""
CHARACTER, HANDLE, AXIS = 5.2, 36.0, 50.0
"""Widths in points: an average character of a legend, the space around an entry, an axis with its label."""


def thin(points: Sequence[T], most: int = MOST) -> list[T]:
    """Return at most `most` of the points, evenly spaced, including the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def plain(name: str, longest: int = LONGEST) -> str:
    """Return a name from the data as one short printable line; what XML cannot hold is replaced."""
    printable = "".join(character if character.isprintable() else "�" for character in name)
    return printable if len(printable) <= longest else f"{printable[: longest - 1]}…"


def new_figure(height: float, width: float = WIDTH) -> Any:
    """Return a figure of this size, in inches, in the style of all charts."""
    # Through the object interface there is no window, and no figure to close. The style is global, for all threads.
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(figure)
    return figure


def svg(figure: Any, title: str) -> bytes:
    """Return a figure as SVG with a title, without a date, so that each drawing gives the same bytes."""
    target = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # the reader's fonts draw these characters
        figure.savefig(target, format="svg", metadata={"Title": title, "Date": None})
    return target.getvalue()


def panel(axis: Any, label: str, zero: bool = False) -> Any:
    """Label `axis` and return it; with `zero` extend it to include 0."""
    axis.set_ylabel(label)
    axis.margins(y=0.08)
    axis.locator_params(nbins=6)
    if zero:
        axis.update_datalim([(0.0, 0.0)], updatex=False)
    return axis


def steps_axis(axis: Any, label: str) -> None:
    axis.set_xlabel(label)
    axis.locator_params(axis="x", integer=True)


def line(axis: Any, curve: Curve, colour: str, label: str, style: Any = "-", **options: Any) -> None:
    """Draw a curve; a single point as a dot, an empty curve not at all. `style` is a matplotlib linestyle."""
    if curve:
        steps, values = zip(*curve, strict=True)
        axis.plot(steps, values, **{"marker": "o" if len(curve) == 1 else "", **options},
                  color=colour, linestyle=style, label=label)  # fmt: skip


def reliability_panel(axis: Any, bins: Iterable[Mapping[str, float]], colour: str) -> None:
    """Draw bins of confidence against accuracy, with the diagonal."""
    axis.plot([0.5, 1.0], [0.5, 1.0], color=GREY, linestyle=":", label="perfect calibration")
    bins = list(bins)
    below = [max(0.0, point["accuracy"] - point["low"]) for point in bins]
    above = [max(0.0, point["high"] - point["accuracy"]) for point in bins]
    axis.errorbar(
        [point["confidence"] for point in bins],
        [point["accuracy"] for point in bins],
        yerr=[below, above],
        marker="o",
        markersize=4,
        capsize=2,
        color=colour,
        label="reward model, with intervals",
    )
    axis.set_xlim(0.48, 1.02)


def legend(axis: Any) -> None:
    """Draw a legend above the panel, where it hides no curve: in two columns if the labels fit. One curve has none."""
    _, labels = axis.get_legend_handles_labels()
    if len(labels) > 1:
        half = -(-len(labels) // 2)  # matplotlib fills one column after the other
        width = sum(HANDLE + CHARACTER * max(map(len, column)) for column in (labels[:half], labels[half:]))
        columns = 2 if width <= 72 * axis.figure.get_figwidth() - AXIS else 1
        axis.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.1, columnspacing=1.2)
