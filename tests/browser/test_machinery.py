"""The browser tests' own tools see what they are there to see: a page with every fault, and one with none."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser

GOOD = '<!doctype html><html lang="en"><title>t</title><main><h1>Head</h1><p>text</p></main></html>'
BAD = """<!doctype html><html><title>t</title>
<meta http-equiv="Content-Security-Policy" 
      content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'">
<main><h1>Head</h1>
<img src="http://127.0.0.1:9/x.png"><p style="color:#ddd;background:#fff;width:3000px">pale</p></main>
<script>console.error("said"); alert("asked"); throw new Error("thrown")</script></html>"""


@pytest.fixture
def pages(tmp_path: Path) -> tuple[Path, Path]:
    good, bad = tmp_path / "good.html", tmp_path / "bad.html"
    good.write_text(GOOD)
    bad.write_text(BAD)
    return good, bad


def test_axe_finds_planted_faults_and_none_in_a_good_page(
    pages: tuple[Path, Path], open_page: Callable, violations: Callable
) -> None:
    good, bad = pages
    assert violations(open_page(good).page) == []
    found = " ".join(violations(open_page(bad).page))
    assert "html-has-lang" in found and "image-alt" in found


def test_what_a_page_asks_for_and_complains_of_is_seen(pages: tuple[Path, Path], open_page: Callable) -> None:
    good, bad = pages
    quiet, loud = open_page(good), open_page(bad)
    assert quiet.requests == [good.as_uri()] and quiet.errors == []
    assert "thrown" in loud.errors and "said" in loud.errors and "dialog: asked" in loud.errors
    assert any("Content Security Policy" in error for error in loud.errors), loud.errors


def test_a_page_wider_than_its_window_is_seen(
    pages: tuple[Path, Path], open_page: Callable, overflow: Callable
) -> None:
    good, bad = pages
    assert overflow(open_page(good).page) == 0
    assert overflow(open_page(bad, width=390).page) > 2000


def test_width_and_colour_scheme_reach_the_page(pages: tuple[Path, Path], open_page: Callable) -> None:
    page = open_page(pages[0], width=390, scheme="dark").page
    assert page.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [390, True]
