"""The rule that keeps the tree readable: few entries a folder, one line of description in each package."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from tasks.stages import STAGES

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "data_contracts", "components")
FOLDERS = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package, *(ROOT / package).rglob("*"))
    if path.is_dir() and path.name != "__pycache__"
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_folder_holds_few_entries_and_its_init_is_one_docstring_line(folder: Path) -> None:
    entries = [each.name for each in folder.iterdir() if each.name not in ("__init__.py", "__pycache__")]
    assert len(entries) <= (18 if folder.parent == ROOT else 12), "make a folder inside it"
    if any(name.endswith(".py") for name in entries):
        text = (folder / "__init__.py").read_text()
        assert text.count("\n") == 1 and ast.get_docstring(ast.parse(text))


def test_the_top_level_has_the_packages_and_a_few_files() -> None:
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    names = {name.partition("/")[0] for name in files if name and not name.startswith(".")}
    texts = {"pyproject.toml", "README.md", "Makefile", "CONTRIBUTING.md", "LICENSE"}
    assert names == {*PACKAGES, *texts, "tests", "infra", "docs"}


def test_a_package_of_components_is_in_a_layer_or_is_a_stages_that_no_other_imports() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each.get("containers") == ["components"])
    placed = {name for layer in layers for name in re.split(r"\W+", layer)}
    stages = {stage.module.split(".")[1] for stage in STAGES.values() if stage.module.startswith("components.")}
    packages = {path.name for path in (ROOT / "components").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert packages <= placed | stages
    for new in packages - placed:
        others = [path for path in (ROOT / "components").rglob("*.py") if new not in path.parts]
        assert not [path for path in others if f"components.{new}" in path.read_text()]


def test_no_two_public_classes_share_a_name() -> None:
    seen: dict[str, list[str]] = {}
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                seen.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in seen.items() if len(paths) > 1} == {}
