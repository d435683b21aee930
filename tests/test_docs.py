"""The documents say what is there."""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from flows.cli.__main__ import app

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
