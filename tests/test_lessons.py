"""The lessons run, and print what their pages and notebooks show."""

import json
from pathlib import Path

import pytest

from tests.lessons import LESSONS, Cell, cells, notebook, page, run

WHOLE = {"from_python"}
"""Lessons that start a run."""
SCRIPTS = sorted(LESSONS.glob("*.py"))


@pytest.mark.parametrize("script", [each for each in SCRIPTS if each.stem not in WHOLE], ids=lambda path: path.stem)
def test_a_lessons_page_and_notebook_show_what_it_prints(script: Path) -> None:
    """`make lessons` writes them anew; look at the numbers that changed."""
    done = run(script)
    assert script.with_suffix(".md").read_text() == page(script.stem, done)
    assert json.loads(script.with_suffix(".ipynb").read_text()) == json.loads(notebook(done))


def test_there_are_lessons() -> None:
    assert {"bandit", "by_hand"} <= {each.stem for each in SCRIPTS}


def test_a_cell_that_raises_fails_its_lesson(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("# %% [markdown]\n# # Title\n#\n# Text\n\n# %%\na = 1\nprint(a)\n\n# %%\nassert a == 2\n")
    assert cells(script.read_text()) == [
        Cell("markdown", "# Title\n\nText"),
        Cell("code", "a = 1\nprint(a)"),
        Cell("code", "assert a == 2"),
    ]
    with pytest.raises(AssertionError):
        run(script)
