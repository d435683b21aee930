"""The lessons run, and print what their pages and notebooks show."""

import json
import re
import subprocess
import sys
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


@pytest.mark.whole
def test_the_lesson_with_a_run_prints_what_its_page_shows_but_for_the_numbers() -> None:
    """A run's numbers depend on the processor; states, metrics, stages and columns do not."""
    script = LESSONS / "from_python.py"
    code = f"from tests.lessons import *; print(page('{script.stem}', run(LESSONS / '{script.name}')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=LESSONS.parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, printed = (masked(each) for each in (script.with_suffix(".md").read_text(), done.stdout))
    assert shown.count("#") > 20
    assert printed == shown


def masked(text: str) -> str:
    """`text` without its numbers, and without white space, which aligns them."""
    return re.sub(r"\s", "", re.sub(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", "#", text))


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
