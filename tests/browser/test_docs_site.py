"""The documentation as `make docs` builds it: read from disk, at both widths and in both schemes, with no network."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
LOOKS = [
    ("index.html", 1280, "light"), ("guide/training.html", 390, "dark"), ("guide/commands.html", 390, "light"),
    ("guide/people.html", 1280, "dark"), ("reference/gates.html", 390, "light"), ("security.html", 1280, "light"),
]  # fmt: skip
"""Pages with pictures, tables, code, long names and lists."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the site is."""
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--config-file", ROOT / ".mkdocs.yml"]
    subprocess.run([*command, "--site-dir", out], check=True, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return out


@pytest.mark.parametrize(("name", "width", "scheme"), LOOKS)
def test_axe_finds_nothing_serious_nothing_runs_over_and_nothing_is_asked_of_the_network(
    site: Path, name: str, width: int, scheme: str,
    open_page: Callable, violations: Callable, overflow: Callable, picture: Callable,
) -> None:  # fmt: skip
    path = site / name
    visit = open_page(path, width=width, scheme=scheme)
    picture(visit.page, f"docs-{path.stem}-{width}-{scheme}")
    found = [each for each in violations(visit.page) if "(serious)" in each or "(critical)" in each]
    assert found == []
    assert overflow(visit.page) == 0
    assert [url for url in visit.requests if not url.startswith(("file:", "data:", "blob:"))] == []
