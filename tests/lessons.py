"""The lessons of the docs: scripts in cells, run, and written with what they print as notebooks and as pages.

python -m tests.lessons            # `make lessons`: run the lessons, write their .ipynb and .md beside them
"""

import ast
import contextlib
import io
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

LESSONS = Path(__file__).resolve().parents[1] / "docs" / "lessons"


class Cell(NamedTuple):
    """A cell of a script in the percent format (jupytext's), and what it printed."""

    kind: str
    """`markdown` or `code`."""
    text: str
    printed: str = ""


def cells(script: str) -> list[Cell]:
    """The cells of a script: a line `# %%` begins one of code, `# %% [markdown]` one of text in comments."""
    found = []
    for head, body in re.findall(r"^# %%(.*)\n((?:(?!# %%).*\n?)*)", script, re.M):
        if "[markdown]" in head:
            found.append(Cell("markdown", re.sub(r"^# ?", "", body, flags=re.M).strip()))
        else:
            found.append(Cell("code", body.strip("\n")))
    return found


def run(path: Path) -> list[Cell]:
    """Run the cells of a lesson one after the other, as a notebook does.

    Returns the cells with what they printed. What a cell raises goes on.
    """
    names: dict[str, Any] = {"__name__": "lesson"}
    done = []
    for number, cell in enumerate(cells(path.read_text())):
        said = io.StringIO()
        if cell.kind == "code":
            with contextlib.redirect_stdout(said):
                exec(compile(ast.parse(cell.text), f"{path.name}, cell {number}", "exec"), names)
        done.append(cell._replace(printed=said.getvalue()))
    return done


def notebook(done: list[Cell]) -> str:
    """The cells as a Jupyter notebook (nbformat 4.5)."""
    made = []
    for number, cell in enumerate(done):
        base = {"cell_type": cell.kind, "id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(True)}
        if cell.kind == "code":
            out = [{"name": "stdout", "output_type": "stream", "text": cell.printed.splitlines(True)}]
            base |= {"execution_count": None, "outputs": out if cell.printed else []}
        made.append(base)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def page(name: str, done: list[Cell]) -> str:
    """The cells as Markdown, with what they printed."""
    parts = []
    for cell in done:
        parts.append(cell.text if cell.kind == "markdown" else f"```python\n{cell.text.strip()}\n```")
        if cell.printed:
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
    foot = f"*Written by `make lessons` from `{name}.py`; the notebook is [{name}.ipynb]({name}.ipynb).*"
    return "\n\n".join([*parts, foot]) + "\n"


def main() -> None:
    """Run the lessons that are named, or all, and write their notebooks and pages."""
    wanted = sys.argv[1:]
    for path in sorted(LESSONS.glob("*.py")):
        if not wanted or path.stem in wanted:
            done = run(path)
            path.with_suffix(".ipynb").write_text(notebook(done))
            path.with_suffix(".md").write_text(page(path.stem, done))


if __name__ == "__main__":
    main()
