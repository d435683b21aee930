"""The picture of a lineage: every box has its place, every arrow leads from one to another, and text stays text."""

import itertools
import re
import xml.etree.ElementTree as ET

from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.lineage.picture import Box, Diagram, draw, in_html, told

SVG = "{http://www.w3.org/2000/svg}"


def boxes(svg):
    """x, y, width and height of each box, and the size of the picture."""
    root = ET.fromstring(svg)
    drawn = [each for each in root.iter(f"{SVG}rect") if each.get("class", "").startswith("box")]
    of = [tuple(float(each.get(name)) for name in ("x", "y", "width", "height")) for each in drawn]
    return of, (float(root.get("width")), float(root.get("height")))


@given(st.integers(1, 9), st.sets(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
@settings(max_examples=60, deadline=None)
def test_no_box_covers_another_even_if_a_record_claims_a_cycle(count, links):
    graph = Diagram([Box(str(i), f"box {i}", ("a line",)) for i in range(count)], [(str(a), str(b)) for a, b in links])
    svg = draw(graph)
    found, (width, height) = boxes(svg)
    assert len(found) == count
    for x, y, wide, tall in found:
        assert x >= 0 and y >= 0 and x + wide <= width and y + tall <= height
    for (x, y, wide, tall), (to_x, to_y, _, _) in itertools.combinations(found, 2):
        assert abs(x - to_x) >= wide or abs(y - to_y) >= tall
    assert draw(graph) == svg


def test_boxes_keep_their_order_and_arrows_go_around_the_boxes_between() -> None:
    names = ("data", "sft", "reward", "ppo")
    svg = draw(Diagram([Box(name, name) for name in names], [("data", "sft"), ("data", "ppo"), ("sft", "ppo")]))
    places, (width, _) = boxes(svg)
    assert places == sorted(places, key=lambda place: place[1])
    down, *around = re.findall(r'class="arrow" [^>]*d="([^"]*)"', svg)
    assert re.fullmatch(r"M[\d.]+ [\d.]+V[\d.]+", down)
    right = places[0][0] + places[0][2]
    sides = []
    for path in around:
        start, _, side, _, other, _, end, _ = map(float, re.findall(r"[\d.]+", path))
        assert start == end == right and side == other and right < right + 0.75 * (side - right) <= width
        sides.append(side)
    assert sides[0] > sides[1], "the longer one goes further out"


def test_text_of_others_is_text_and_a_long_one_is_cut() -> None:
    hostile = "<script>alert(1)</script>\x1b[31m" + "x" * 100
    svg = draw(Diagram([Box("a", hostile, (hostile,), hostile, "failed")], []))
    root = ET.fromstring(svg)
    assert not list(root.iter(f"{SVG}script"))
    shown = ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]
    assert all(len(each) < 40 and each.startswith("<script>") and each.endswith("…") for each in shown), shown
    assert "<script" not in in_html(Diagram([Box("a", hostile)], []))


def test_who_does_not_see_it_is_told_what_was_made_of_what() -> None:
    graph = Diagram([Box("a", "data", (), "4 gates passed"), Box("b", "sft")], [("a", "b")])
    assert told(graph) == "data (4 gates passed); sft from data"
    assert 'alt="Lineage: data (4 gates passed); sft from data"' in in_html(graph)


def test_the_demos_pipeline_fits_a_telephone_at_full_size() -> None:
    """Scaled down, its text would be smaller than 12 pixels."""
    names = ("data", "sft", "reward", "ppo", "sheet", "human_eval")
    arrows = [(a, b) for a, b in itertools.combinations(names, 2) if b != "sheet" and (a != "sheet" or b == names[-1])]
    _, (width, _) = boxes(draw(Diagram([Box(name, name) for name in names], arrows)))
    assert width <= 390 - 2 * 8
    assert re.search("font-size:12px", draw(Diagram([], [])))
