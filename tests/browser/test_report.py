"""A run's report in a browser: from disk, with no network, at both widths, in both schemes, by keyboard."""

import base64
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.models import lineage_text
from flows.models.lineage import lineage
from flows.reports.page import write_page
from tests.stored_run import HOSTILE, stored_run
from tests.waiting import until

pytestmark = pytest.mark.browser

LOOKS = [
    *(("passed", width, scheme) for width in (1280, 390) for scheme in ("light", "dark")),
    ("stopped", 390, "light"),
    ("waived", 1280, "dark"),
]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A passed run, one that a gate stopped, and one with a waiver and hits."""
    home = tmp_path_factory.mktemp("reports")
    passed = stored_run(home, changes=["ppo.kl.control=adaptive", "ppo.updates=90"], draw=True)
    stopped = stored_run(home / "stopped", changes=["gates.policy.kl=2.5"])
    hits = stored_run(home, "20260102-000000-bbbb", changes=["gates.policy.kl=2.5"], waive={"policy.kl": HOSTILE},
                      by=passed)  # fmt: skip
    runs = {"passed": (home, passed), "stopped": (home / "stopped", stopped), "waived": (home, hits)}
    return {name: write_page(*each) for name, each in runs.items()}


@pytest.mark.parametrize(("width", "scheme"), [(1280, "dark"), (390, "light")])
def test_axe_finds_nothing_on_a_lineage_whose_picture_fits(
    reports: dict[str, Path], tmp_path: Path, width: int, scheme: str,
    open_page: Callable, violations: Callable, overflow: Callable, picture: Callable,
) -> None:  # fmt: skip
    run = reports["passed"].parent.name
    path = tmp_path / "lineage.html"
    path.write_text(lineage_text.page(lineage(reports["passed"].parents[2], run)))
    visit = open_page(path, width=width, scheme=scheme)
    picture(visit.page, f"lineage-{width}-{scheme}")
    natural, drawn = visit.page.locator("img").evaluate("image => [image.naturalWidth, image.clientWidth]")
    assert 100 < drawn <= min(natural, width)
    assert violations(visit.page) == [] and visit.errors == []
    assert overflow(visit.page) == 0


@pytest.mark.parametrize(("which", "width", "scheme"), LOOKS)
def test_axe_finds_nothing_and_nothing_runs_over(
    reports: dict[str, Path], which: str, width: int, scheme: str,
    open_page: Callable, violations: Callable, overflow: Callable, picture: Callable,
) -> None:  # fmt: skip
    page = open_page(reports[which], width=width, scheme=scheme).page
    picture(page, f"report-{which}-{width}-{scheme}")
    assert overflow(page) == 0
    # What lies in closed details has to be as good.
    page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert violations(page) == []
    assert overflow(page) == 0


# 358 pixels are left for a chart on a telephone.
LABELS = """image => {
  const svg = atob(image.src.split(",")[1]);
  const units = Number(svg.match(/viewBox="0 0 ([0-9.]+)/)[1]);
  const sizes = [...svg.matchAll(/(?:font: |font-size: ?)([0-9.]+)px/g)].map(each => Number(each[1]));
  return sizes.map(size => size * image.clientWidth / units);
}"""


@pytest.mark.parametrize(("width", "most"), [(390, 12), (1280, 17)])
def test_labels_of_charts_are_read_on_a_telephone_and_do_not_outgrow_the_text(
    reports: dict[str, Path], width: int, most: float, open_page: Callable
) -> None:
    """They had 9 pixels on a telephone: charts were drawn for a page of half a metre and shrunk."""
    images = open_page(reports["passed"], width=width).page.locator("figure img")
    found = [size for image in images.all() for size in image.evaluate(LABELS)]
    assert len(found) > 20 and min(found) >= 11 and max(found) <= most, (min(found), max(found))


def test_the_page_asks_for_nothing_but_itself(reports: dict[str, Path], open_page: Callable) -> None:
    visit = open_page(reports["waived"])
    visit.page.wait_for_timeout(300)
    assert [url for url in visit.requests if not url.startswith("data:image/svg+xml;base64,")] == [
        reports["waived"].as_uri()
    ]
    assert visit.errors == []


def test_every_chart_is_shown_and_named(reports: dict[str, Path], open_page: Callable) -> None:
    charts = open_page(reports["passed"]).page.locator("figure img")
    found = charts.evaluate_all("all => all.map(each => [each.complete && each.naturalWidth, each.alt])")
    assert len(found) == 5 and all(width > 300 and len(alt) > 20 for width, alt in found), found


def test_a_script_in_a_chart_does_not_run(reports: dict[str, Path], tmp_path: Path, open_page: Callable) -> None:
    inside = "<script>alert(2)</script><image href='http://127.0.0.1:9/x'/>"
    attack = base64.b64encode(f"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'>{inside}</svg>".encode())
    spoilt = tmp_path / "spoilt.html"
    spoilt.write_text(re.sub('(svg.xml;base64,)[^"]+', rf"\1{attack.decode()}", reports["passed"].read_text()))
    visit = open_page(spoilt, bypass_csp=True)
    visit.page.wait_for_timeout(300)
    assert visit.errors == [] and not [url for url in visit.requests if ":9/" in url]
    assert visit.page.title().startswith("Run ")


def test_a_script_in_a_sample_is_shown_and_not_run(reports: dict[str, Path], open_page: Callable) -> None:
    # Without the page's content policy, so that escaping alone has to do.
    visit = open_page(reports["waived"], bypass_csp=True)
    assert visit.page.title().startswith("Run 20260102")
    assert visit.page.locator("script, img:not([src^='data:image/svg+xml;base64,'])").count() == 0
    shown = [each for each in visit.page.locator(".said").all_inner_texts() if each == HOSTILE]
    assert len(shown) == 1
    assert visit.errors == [] and len([url for url in visit.requests if not url.startswith("data:")]) == 1


def test_the_content_policy_stops_what_escaping_might_miss(
    reports: dict[str, Path], tmp_path: Path, open_page: Callable
) -> None:
    spoilt = tmp_path / "spoilt.html"
    with socket.create_server(("127.0.0.1", 0)) as server:
        attack = HOSTILE.replace(":9/", f":{server.getsockname()[1]}/")
        spoilt.write_text(reports["passed"].read_text().replace("<main>", f"<main>{attack}"))
        visit = open_page(spoilt)
        server.settimeout(0.5)
        with pytest.raises(TimeoutError):
            server.accept()
    until("the page has complained", lambda: visit.page.wait_for_timeout(20) or len(visit.errors) > 2, 10)
    assert visit.page.title().startswith("Run ")
    refused = [error for error in visit.errors if "Content Security Policy" in error]
    assert len(refused) == len(visit.errors) == 3, "the script, the picture, its handler"


def test_tab_reaches_every_box_that_scrolls_and_arrows_scroll_it(reports: dict[str, Path], open_page: Callable) -> None:
    page = open_page(reports["passed"], width=390).page
    page.evaluate("document.querySelectorAll('.scroll').forEach((each, i) => { each.dataset.number = i })")
    wide = "each => each.scrollWidth > each.clientWidth && each.checkVisibility()"
    scrolling = page.evaluate(
        f"[...document.querySelectorAll('.scroll')].filter({wide}).map(each => each.dataset.number)"
    )
    assert len(scrolling) >= 3
    reached = set()
    for _ in range(120):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.dataset.number"))
    assert set(scrolling) <= reached
    box = page.locator(f"[data-number='{scrolling[0]}']")
    box.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("box => box.scrollLeft > 0", arg=box.element_handle())


def test_the_style_sheet_counts_and_dark_is_dark(reports: dict[str, Path], open_page: Callable) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    assert open_page(reports["passed"], scheme="light").page.evaluate(colour) == "rgb(255, 255, 255)"
    assert open_page(reports["passed"], scheme="dark").page.evaluate(colour) == "rgb(13, 17, 23)"
