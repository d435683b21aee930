"""Check names and sizes in the four packages: `python -m tests.names`, part of `make check`.

Exit 1 with `FILE:LINE: finding` for a name of `[tool.names]` in pyproject.toml, a module's name that occurs twice, a
function of more than 60 lines without a comment that says why, and a class of more than 12 fields.
"""

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("components", "data_contracts", "flows", "tasks")
LINES, FIELDS = 60, 12
LONG = "# long:"
"""A comment in a function, with the reason why it has more lines, or in a class, why it has more fields."""
REPEATED = {"__init__", "__main__", "config", "stage"}
"""Names that several modules may have."""


def names(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """Yield kind, name and line of each class, function, field, argument and variable."""
    declared_fields: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield "class", node.name, node.lineno
            if not is_options(node):
                yield from (("field", field.id, field.lineno) for field in fields(node))
            declared_fields |= set(fields(node))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield "function", node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield "argument", node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in declared_fields:
            yield "variable", node.id, node.lineno


def is_options(node: ast.ClassDef) -> bool:
    """Return whether a class holds options of users, which keep their names."""
    return any(ast.unparse(base).endswith(("Settings", "Config", "Job")) for base in node.bases)


def fields(node: ast.ClassDef) -> list[ast.Name]:
    """Return the fields that a class declares."""
    declared = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
    return [target for target in declared if isinstance(target, ast.Name)]


def sizes(tree: ast.AST, lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield line and finding for each function that is too long and each class with too many fields."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            assert node.end_lineno is not None
            if any(LONG in line for line in lines[node.lineno - 1 : node.end_lineno]):
                continue
            length = node.end_lineno - node.lineno + 1
            if isinstance(node, ast.ClassDef):
                if len(fields(node)) > FIELDS and not is_options(node):
                    yield node.lineno, f"class {node.name} has {len(fields(node))} fields, of {FIELDS}"
            elif length > LINES:
                yield node.lineno, f"{node.name}() has {length} lines, of {LINES}"


def findings() -> Iterator[str]:
    """Yield each finding in the four packages."""
    refused = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["names"]
    modules: dict[str, str] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        place, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if path.stem not in REPEATED and (other := modules.setdefault(path.stem, place)) != place:
            yield f"{place}:1: {other} has the same name"
        tree = ast.parse(text)
        for kind, name, line in [("module", path.stem, 1), *names(tree)]:
            word = name.strip("_")
            if word in refused["vague"] and kind in ("argument", "variable"):
                yield f"{place}:{line}: {kind} {name}: name what it holds"
            elif word.lower() in refused["coined"]:
                yield f"{place}:{line}: {kind} {name}: write {refused['coined'][word.lower()]}"
        yield from (f"{place}:{line}: {finding}" for line, finding in sizes(tree, text.splitlines()))


if __name__ == "__main__":
    print(*(found := list(findings())), sep="\n")
    sys.exit(bool(found))
