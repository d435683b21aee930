"""The sections of `tether --help`, and the names of commands that are gone."""

import re

import pytest
import typer
from typer.testing import CliRunner

from flows.cli.__main__ import app
from flows.cli.replaced import REPLACED, SECTIONS

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def test_every_command_is_in_one_section_of_the_help() -> None:
    names = [name for section in SECTIONS.values() for name in section]
    assert len(names) == len(set(names)) and set(COMMANDS) <= set(names)
    shown = CliRunner().invoke(app, ["--help"]).output
    assert [title for title in SECTIONS if f"\n{title}:\n" in shown] == list(SECTIONS)
    assert {name for name in COMMANDS if re.search(rf"\n  {name}  +\w", shown)} == set(COMMANDS)


@pytest.mark.parametrize("old", REPLACED)
def test_an_old_name_answers_with_what_to_use(old: str) -> None:
    done = CliRunner().invoke(app, [*old.split(), "RUN", "--set", "a=b"])
    assert done.exit_code == 2 and done.output.split() == f"tether: `tether {old}` is gone. {REPLACED[old]}".split()


def test_each_command_that_replaces_another_exists() -> None:
    for sentence in REPLACED.values():
        for words in re.findall(r"`tether ([a-z]+)(?: ([a-z]+))?", sentence):
            group = COMMANDS[words[0]]
            assert not words[1] or words[1] in group.commands, sentence


def test_a_command_of_a_group_that_is_gone_names_the_group() -> None:
    done = CliRunner().invoke(app, ["human-eval", "score", "sheet.csv"])
    assert done.exit_code == 2 and "Its commands are in `tether people`" in done.output
    mistyped = CliRunner().invoke(app, ["store", "unpinned"])
    assert mistyped.exit_code == 2 and "No such command" in mistyped.output
