"""Headless Chromium for tests of pages. Playwright's wheel drives the system's browser, so nothing is downloaded."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.waiting import PATIENCE

if TYPE_CHECKING:  # plain pytest, which leaves these tests out, must not need it
    from playwright.sync_api import Browser, Dialog, Page

ROOT = Path(__file__).resolve().parents[2]
WAIT = PATIENCE * 30_000
"""Milliseconds for a page to be loaded or to show something, and for Chromium to start."""


class Visit(NamedTuple):
    """A page that was opened, and what happened on it."""

    page: "Page"
    requests: list[str]
    """Every URL that it asked for, its own among them."""
    errors: list[str]
    """Errors on its console, uncaught exceptions and dialogs; what its content policy refused is among them."""


Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def browser() -> Iterator["Browser"]:
    """A Chromium for the tests of a file; while it is there, asyncio takes a loop for running, and Prefect too."""
    from playwright.sync_api import sync_playwright

    found = subprocess.run(
        ["sh", str(ROOT / "infra" / "chromium.sh")], capture_output=True, text=True, check=False, timeout=500
    )
    if found.returncode:
        pytest.fail(f"no Chromium: {found.stderr.strip()[-400:]}", pytrace=False)
    with sync_playwright() as playwright:
        # Root in a container has no sandbox of Chromium's to enter; the pages are ours.
        chromium = playwright.chromium.launch(executable_path=found.stdout.strip(), args=["--no-sandbox"], timeout=WAIT)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: "Browser") -> Iterator[Open]:
    """`open_page(url_or_file, width=1280, scheme="light", **context)` opens a page in a profile of its own."""
    contexts = []

    def open_page(target: str | Path, width: int = 1280, scheme: str = "light", **options: Any) -> Visit:
        height = 844 if width < 600 else 900
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce", **options
        )
        context.set_default_timeout(WAIT)
        contexts.append(context)
        page = context.new_page()
        visit = Visit(page, [], [])

        def on_dialog(dialog: "Dialog") -> None:
            visit.errors.append(f"dialog: {dialog.message}")
            dialog.dismiss()

        page.on("request", lambda request: visit.requests.append(request.url))
        page.on("console", lambda message: visit.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: visit.errors.append(str(error)))
        page.on("dialog", on_dialog)
        page.goto(target.resolve().as_uri() if isinstance(target, Path) else target, wait_until="load")
        return visit

    yield open_page
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def violations() -> Callable[..., list[str]]:
    """`violations(page)` runs axe on it: a line for each element that breaks a rule, empty for a good page.

    A second argument chooses within the page or leaves parts of it out, as axe's `context` does.
    """
    from axe_playwright_python.sync_playwright import Axe

    axe = Axe()

    def violations(page: "Page", context: Any = None) -> list[str]:
        found = axe.run(page, context=context).response["violations"]
        return [
            f"{rule['id']} ({rule['impact']}): {node['target']}: {node['failureSummary']}"
            for rule in found
            for node in rule["nodes"]
        ]

    return violations


@pytest.fixture(scope="session")
def picture() -> Callable[["Page", str], None]:
    """`picture(page, name)` keeps the whole page as NAME.png in the folder TETHER_PICTURES, where that is set."""

    def picture(page: "Page", name: str) -> None:
        if folder := os.environ.get("TETHER_PICTURES"):
            page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)

    return picture


@pytest.fixture(scope="session")
def overflow() -> Callable[["Page"], int]:
    """`overflow(page)`: by how many pixels a page is wider than its window; 0 where it doesn't scroll sideways."""

    def overflow(page: "Page") -> int:
        return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    return overflow
