"""Charts: points lie where their numbers say, odd input draws what it can, and nothing in a name is markup."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.charts import LEFT, MOST, PANEL, RIGHT, TOP, WIDTH, Panel, Rule, Series, _ticks, chart, interval_chart, thin

SVG = "{*}"


def drawing(panels: list[Panel], **options: object) -> ElementTree.Element:
    made = chart("c", "What is seen", panels, "step", **options)  # type: ignore[arg-type]
    assert made is not None
    return ElementTree.fromstring(made.svg)


def path(svg: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    found = next(each for each in svg.iter() if each.get("class", "").startswith(kind))
    return [(float(x), float(y)) for x, y in re.findall(r"([-\d.]+),([-\d.]+)", found.get("d", ""))]


def test_a_curve_goes_from_edge_to_edge_and_zero_is_the_ground() -> None:
    svg = drawing([Panel("loss", [Series("loss", [(1, 0.0), (2, 5.0), (3, 10.0)])], zero=True)])
    (x1, y1), (x2, y2), (x3, y3) = path(svg, "line a")
    assert (x1, x3) == (LEFT, WIDTH - RIGHT) and x2 == pytest.approx((x1 + x3) / 2, abs=0.1)
    # The upper end has 5 % of room: 10 of 10.5.
    assert (y1, y3) == (TOP + PANEL, pytest.approx(TOP + PANEL * (1 - 10 / 10.5), abs=0.1))
    assert y2 == pytest.approx((y1 + y3) / 2, abs=0.1)


def test_panels_share_their_x_axis() -> None:
    svg = drawing([Panel("a", [Series("a", [(1, 1), (5, 2)])]), Panel("b", [Series("b", [(3, 1), (5, 2)], "b")])])
    assert path(svg, "line b")[0][0] == pytest.approx((LEFT + WIDTH - RIGHT) / 2)
    assert path(svg, "line b")[1][0] == path(svg, "line a")[1][0]
    assert path(svg, "line b")[1][1] > TOP + PANEL, "below the first panel"


def test_levels_and_intervals_are_within_the_picture() -> None:
    series = Series("rate", [(0.5, 0.5), (1.0, 0.75)], bars=[(0.25, 0.75), (0.5, 1.0)])
    svg = drawing([Panel("y", [series], [Rule("bound", 2.0, "e"), Rule("band", 1.5, "d", (1.25, 1.75))])])
    heights = [float(each) for each in re.findall(r"[,V](\d+\.\d)", ElementTree.tostring(svg, "unicode"))]
    assert min(heights) >= TOP and max(heights) <= TOP + PANEL
    band = next(each for each in svg.iter() if each.get("class") == "band")
    assert float(band.get("height", 0)) == pytest.approx(PANEL * 0.5 / (1.75 * 1.1), abs=0.2)


def test_what_is_not_finite_is_left_out_and_nothing_at_all_is_no_chart() -> None:
    made = chart("c", "t", [Panel("y", [Series("s", [(1, math.nan), (2, 1.0), (3, math.inf), (4, 2.0)])])], "step")
    assert made is not None and made.rows == [[2, 1.0], [4, 2.0]]
    assert chart("c", "t", [Panel("y", [Series("s", [(1, math.nan)])], [Rule("r", 1, "e")])], "step") is None


def test_a_single_point_is_a_dot_in_the_middle() -> None:
    svg = drawing([Panel("y", [Series("s", [(7, 3.0)])])])
    (dot,) = svg.findall(f"{SVG}circle")
    assert float(dot.get("cx", 0)) == (LEFT + WIDTH - RIGHT) / 2 and float(dot.get("cy", 0)) == TOP + PANEL / 2


def test_the_numbers_are_the_points_in_one_table() -> None:
    made = chart("c", "t", [Panel("y", [Series("a", [(1, 1), (2, 2)]), Series("b", [(2, 5)], "b")])], "step")
    assert made is not None
    assert (made.columns, made.rows) == (["step", "a", "b"], [[1, 1, None], [2, 2, 5]])
    assert made.legend == [("a", "a"), ("b", "b")]


def test_people_who_do_not_see_it_are_told_and_names_are_text() -> None:
    made = chart("c", "<i>&", [Panel("y", [Series("<b>&", [(1, 2), (9, 4)])], [Rule("bound 3", 3, "e")])], "step")
    assert made is not None
    svg = ElementTree.fromstring(made.svg)
    assert svg.findtext(f"{SVG}title") == "<i>&"
    told = svg.find(f"{SVG}desc")
    assert (
        told is not None
        and told.text == "<b>& goes from 2 at 1 to 4 at 9 (step). bound 3. The numbers are in the table below."
    )
    assert svg.get("role") == "img" and svg.get("aria-labelledby") == "c-t c-d"


def test_a_lying_interval_reaches_from_end_to_end() -> None:
    made = interval_chart("w", "t", Series("rate", [(0.75, 0)], bars=[(0.5, 1.0)]), [Rule("half", 0.5, "d")])
    svg = ElementTree.fromstring(made.svg)
    bar = next(each for each in svg.iter() if each.get("class") == "bar wide a")
    low, high = re.fullmatch(r"M([\d.]+),33H([\d.]+)", bar.get("d", "")).groups()  # type: ignore[union-attr]
    assert (float(low), float(high)) == (WIDTH / 2, WIDTH - 14)
    assert made.rows == [[0.75, 0.5, 1.0]]


def test_steps_have_whole_ticks() -> None:
    assert _ticks(1, 3, whole=True) == [1, 2, 3] and _ticks(1, 3) == [1, 1.5, 2, 2.5, 3]


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_within(low: float, room: float) -> None:
    found = _ticks(low, low + room)
    assert 1 <= len(found) <= 7
    assert all(low - room * 1e-6 <= tick <= low + room * (1 + 1e-6) for tick in found)


@given(st.lists(st.integers(), min_size=1, max_size=2000))
def test_a_thinned_curve_keeps_its_ends_and_its_order(points: list[int]) -> None:
    indexed = list(enumerate(points))
    found = thin(indexed)
    assert len(found) == min(len(points), MOST) and found[0] == indexed[0] and found[-1] == indexed[-1]
    assert [index for index, _ in found] == sorted({index for index, _ in found})
