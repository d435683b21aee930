"""The tree in the README is the real tree: every line is a tracked path, every tracked path of two levels is a line."""

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent
_COMMENT = re.compile(r" {2,}(?![\w.-]+(?:/|\.\w+)(?: |$))")
UNLISTED = {".gitignore"}
"""Tracked, and of no interest in an overview."""


def tree_in(text: str) -> list[str] | None:
    """The paths of the first fenced or indented block that has a line for `flows/`; None without one.

    Deeper lines are indented; one line may name several files of a folder; what follows two spaces is a comment.
    """
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    block = next((block for block in blocks if re.search(r"^\s*flows/", block, re.MULTILINE)), None)
    if block is None:
        return None
    lines = [re.sub(r"[│├└─]", " ", line).rstrip() for line in block.splitlines() if line.strip()]
    paths: list[str] = []
    parents: list[tuple[int, str]] = []
    for line in lines:
        indent = len(line) - len(line.lstrip())
        names = _COMMENT.split(line.strip(), maxsplit=1)[0].split()
        while parents and parents[-1][0] >= indent:
            parents.pop()
        above = parents[-1][1] if parents else ""
        paths += [above + name for name in names]
        if len(names) == 1 and names[0].endswith("/"):
            parents.append((indent, above + names[0]))
    return paths


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git checkout, so nothing to compare with")
    return done.stdout.splitlines()


def test_the_parser_reads_folders_files_and_comments() -> None:
    text = (
        "# x\n```text\n"
        "Makefile            demo, test\n"
        "flows/              compose\n"
        "    rlhf.py         the file to read\n"
        "    config.py  cli.py\n"
        "    profiles/       yaml\n"
        "        tiny.yaml\n"
        "tasks/\n"
        "```\n"
    )
    assert tree_in(text) == [
        "Makefile", "flows/", "flows/rlhf.py", "flows/config.py", "flows/cli.py", "flows/profiles/",
        "flows/profiles/tiny.yaml", "tasks/",
    ]  # fmt: skip
    assert tree_in("```\nno tree\n```") is None


def test_the_readmes_tree_is_the_real_tree() -> None:
    files = tracked()
    folders = {f"{parent}/" for file in files for parent in PurePosixPath(file).parents if str(parent) != "."}
    paths = tree_in((ROOT / "README.md").read_text(encoding="utf-8"))
    assert paths, "README.md has no block with the tree"
    strangers = [path for path in paths if path not in folders and path not in files]
    assert strangers == [], "named in the README, not in the repository"
    top = {file.partition("/")[0] + ("/" if "/" in file else "") for file in files}
    modules = {file for file in files if re.fullmatch(r"(flows|tasks|components|data_contracts)/\w+\.py", file)}
    stages = {folder for folder in folders if re.fullmatch(r"(components|flows|tests)/[\w-]+/", folder)}
    named = set(paths)
    missing = sorted(
        path for path in top | modules | stages
        if path not in named and path not in UNLISTED and not path.endswith("/__init__.py")
    )  # fmt: skip
    assert missing == [], "in the repository, not named in the README's tree"
