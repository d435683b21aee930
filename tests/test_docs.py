"""The documents say what is there."""

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from flows.cli.__main__ import app
from tests.documented import anchors, check_settings, commands, links, parse, plain_code
from tests.reference import PAGES, WRITTEN

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    for link, anchor in links(document):
        target = document.parent / link if link else document
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_is_one_that_the_command_line_takes(document: Path) -> None:
    if document in WRITTEN and document.parent.name == "reference":
        return  # written from the command line itself
    for command in commands(document.read_text()):
        check_settings(parse(command))


def test_the_commands_of_a_page_are_found() -> None:
    """Blocks, fences, continued lines, comments, chains and what stands between backticks."""
    page = """
Text `tether runs [--json]`, `make test`.

    tether run demo   # a comment
    TETHER_HOME=x .venv/bin/tether restore DIR && tether store verify

```sh
tether plan gpu \\
    --gpus 1
```
"""
    assert commands(page) == [
        ("plan gpu      --gpus 1", True), ("run demo", True), ("restore DIR", True), ("store verify", True),
        ("runs [--json]", False),
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", ["run demo --sett a=1", "ru demo", "run", "plan demo --gpus many"])
def test_a_command_that_the_command_line_refuses_is_seen(wrong: str) -> None:
    (command,) = commands(f"\n    tether {wrong}\n")
    with pytest.raises(ValueError, match=f"tether {wrong}"):
        parse(command)


def test_the_guides_pages_are_short() -> None:
    lengths = {page.name: page.read_text().count("\n") for page in (ROOT / "docs" / "guide").rglob("*.md")}
    assert len(lengths) > 12 and [name for name, lines in lengths.items() if lines >= 200] == []


def errors() -> dict[str, int | None]:
    """The classes of errors that the code of the four packages defines, with the exit code that each sets."""
    found: dict[str, int | None] = {"TetherError": None}
    paths = [
        path for name in ("components", "data_contracts", "tasks", "flows") for path in (ROOT / name).rglob("*.py")
    ]
    classes = [node for path in paths for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    for node in classes * 3:  # a class may stand before the one that it extends
        if node.name in found or any(isinstance(base, ast.Name) and base.id in found for base in node.bases):
            code = re.search(r"exit_code = (\d+)", ast.unparse(node))
            found[node.name] = int(code[1]) if code else None
    return found


def test_every_error_and_exit_code_is_explained() -> None:
    text = (ROOT / "docs/guide/troubleshooting.md").read_text()
    found = errors()
    assert {"MachineMismatch", "InputChanged"} < set(found)
    assert [name for name, code in found.items() if f"`{name}`" not in text and code != 3] == []
    assert [code for code in found.values() if code and f"\n| {code} |" not in text] == []


def test_every_command_with_an_exit_code_of_its_own_is_explained() -> None:
    """Those that end with `typer.Exit`, as the code of flows/cli says."""
    text = (ROOT / "docs/guide/troubleshooting.md").read_text()
    groups = {"data": "data ", "store": "store "}
    found = []
    for path in sorted((ROOT / "flows/cli").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "raise typer.Exit" in (code := ast.unparse(node)):
                registered = re.search(r"@command\((\w+), '([\w-]+)'", code)
                found += [groups.get(registered[1], "") + registered[2]] if registered else []
    assert len(found) >= 6
    assert [name for name in found if f"\n| `tether {name}" not in text] == []


def test_every_command_is_in_the_list_of_commands() -> None:
    text = plain_code((ROOT / "docs/guide/commands.md").read_text())
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) > 20 and [name for name in commands if f"`tether {name}" not in text] == []


def _groups(command: Any, name: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if hasattr(command, "commands"):
        yield name
        for each, below in command.commands.items():
            yield from _groups(below, (*name, each))


@pytest.mark.parametrize("columns", ["80", "100"])
def test_the_lists_of_commands_show_every_summary_whole(columns: str) -> None:
    """A terminal of so many columns cuts a summary that is too long with `...`."""
    groups = list(_groups(get_command(app)))
    assert len(groups) >= 4
    for group in groups:
        shown = CliRunner().invoke(app, [*group, "--help"], env={"COLUMNS": columns, "TERMINAL_WIDTH": columns}).output
        listed = shown.rpartition("--help")[2].splitlines()
        assert len(listed) > 2 and [row for row in listed if row.rstrip(" │").endswith(("...", "…"))] == [], group


def prefect_commands() -> list[str]:
    """What the pages for operators have a person type, and a pod start, after `prefect`."""
    pages = [ROOT / "docs" / "operations.md", *(ROOT / "docs" / "operations").glob("*.md")]
    text = "\n".join(page.read_text() for page in pages)
    blocks = "\n".join([*re.findall(r"^ {4}.*$", text, re.M), *re.findall(r"```\w+\n(.*?)```", text, re.S)])
    typed = re.findall(r"(?:^|[\s/])prefect ([a-z][^#\n]*)", blocks)
    started = [" ".join(words.split(", ")) for words in re.findall(r"command: \[prefect, ([^\]]*)\]", blocks)]
    return [each.strip() for each in (*typed, *started)]


def test_every_prefect_command_of_the_pages_is_one_that_prefect_takes() -> None:
    from prefect.cli._app import _app

    commands = prefect_commands()
    assert len(commands) > 8
    for command in commands:
        _, bound, left = _app.parse_known_args(shlex.split(command))[:3]
        assert not left and bound.arguments, command


def test_every_command_option_and_gate_of_the_reference_says_what_it_is() -> None:
    for name, page in PAGES.items():
        words = 1 if name == "metrics.md" else -1  # the last column, but for metrics the unit
        rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in page().splitlines() if line.startswith("| `")]
        assert len(rows) > 20 and [row[0] for row in rows if not row[words].strip()] == []
