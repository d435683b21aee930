"""The documents say what is there."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli.__main__ import app
from tests.reference import PAGES

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_link_leads_to_a_file(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    assert [link for link in links if "://" not in link and not (document.parent / link).exists()] == []


def test_every_command_is_in_the_list_of_commands() -> None:
    text = (ROOT / "docs/guide/commands.md").read_text()
    commands = get_command(app).commands  # type: ignore[attr-defined]
    assert len(commands) > 20 and [name for name in commands if f"`tether {name}" not in text] == []


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
        assert len(rows) > 30 and [row[0] for row in rows if not row[words].strip()] == []
