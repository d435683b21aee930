"""proselint on what people read: README, docs, docstrings, and the messages, help and advice in the code.

python -m tests.prose           # `make check`: exit 1 and a line for each finding
python -m tests.prose FILE...   # these files only

The checks are proselint's. `[tool.prose]` in pyproject.toml turns some off and adds phrases that we do not write, each
with what to write instead. It skips code in Markdown, and strings of fewer than four words in Python.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from proselint.checks import __register__ as OF_PROSELINT
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.registry.checks import Check
from proselint.registry.checks.types import PreferredForms
from proselint.tools import LintFile

ROOT = Path(__file__).resolve().parents[1]
READ = ["README.md", "CONTRIBUTING.md", "docs/*.md"] + [
    f"{each}/*.py" for each in ("components", "data_contracts", "flows", "tasks")
]
OURS = "tether"
FEWEST_WORDS = 4
_CODE = re.compile(r"^ {0,3}(```|~~~).*?^ {0,3}\1|^(?: {4}|\t).*?$|(`+)[^`].*?\2|\]\([^)]*\)|<!--.*?-->", re.M | re.S)


def settings() -> dict[str, bool]:
    """Register the checks, proselint's and ours, and return which are on, the most specific first."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]
    registry = CheckRegistry()
    if not registry.checks:
        phrases = PreferredForms({phrase.replace(" ", r"\s+"): instead for phrase, instead in own["phrases"].items()})
        registry.register_many((*OF_PROSELINT, Check(phrases, path=OURS, message="instead of '{1}' write: {0}")))
    theirs = {name: on for name, on in DEFAULT["checks"].items() if name not in own["off"]}
    return dict.fromkeys(own["off"], False) | theirs | {OURS: True}


def findings(path: Path, on: dict[str, bool]) -> Iterator[str]:
    """Return `FILE:LINE: finding` for each finding of the checks that are `on` in a Markdown or Python file."""
    text = path.read_text(encoding="utf-8").encode("utf-8", "replace").decode()
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    prose = _without_code(text if path.suffix == ".md" else _strings(text))
    prose = re.sub(r"[\"“”]|\B['’]|['’]\B", " ", prose)  # proselint reads nothing between quotes, pairs them wrongly
    if prose.strip():
        for found in LintFile(str(shown), prose).lint({"max_errors": 1000, "checks": on}):
            yield f"{shown}:{found.pos[0]}: {' '.join(found.check_result.message.split())}"


def _without_code(text: str) -> str:
    """Return `text` with each code block, code span, address and comment of Markdown blank, on as many lines."""
    return _CODE.sub(lambda found: re.sub(r"[^\n]+", " · ", found[0]), text)


def _strings(source: str) -> str:
    """Return the docstrings and texts of a module, each from its line on; what an f-string fills in is blank."""
    tree = ast.parse(source)
    formatted = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    inner = {id(part) for node in formatted for part in ast.walk(node)} - {id(node) for node in formatted}
    lines = [""] * (len(source.splitlines()) + 1)
    for node in ast.walk(tree):
        if id(node) not in inner and isinstance(node, ast.expr) and len((text := _text(node)).split()) >= FEWEST_WORDS:
            given = [line.strip() for line in text.splitlines()]
            fits = node.lineno - 1 + len(given) <= len(lines)
            for number, line in enumerate(given if fits else [" ".join(given)], node.lineno - 1):
                lines[number] += f" · {line}" if lines[number] else line
    return "\n".join(lines).encode("utf-8", "replace").decode()


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "·" for part in node.values)
    return ""


def main(files: Iterable[str]) -> int:
    """Print each finding in `files`, or in all that people read; return how many there are, at most 1."""
    named = [Path(each).resolve() for each in files]
    listed = subprocess.run(["git", "ls-files", *READ], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    on = settings()
    found = [each for path in named or [ROOT / name for name in listed.splitlines()] for each in findings(path, on)]
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
