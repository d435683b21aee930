"""Standard streams that are closed, full, unread or in another encoding: the documented exit code, no stack trace."""

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console

from components.base.errors import GateFailed
from components.training.stopping import unread_is_fine
from flows.cli import command
from flows.cli.__main__ import app
from flows.cli.command import exit_code

ROOT = Path(__file__).resolve().parents[3]


def paths(group: Any = None, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command, as its words."""
    group = typer.main.get_command(app) if group is None else group
    for name, each in getattr(group, "commands", {}).items():
        yield from paths(each, (*before, name))
    if not hasattr(group, "commands"):
        yield before


COMMANDS = sorted(paths())


def unread() -> io.TextIOWrapper:
    """A pipe whose reader has gone."""
    reading, writing = os.pipe()
    os.close(reading)
    return open(writing, "w")


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")


Lose = Callable[..., None]


@pytest.fixture
def lose(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lose]:
    """`lose(stdout=make)` replaces streams of this process."""
    opened: list[io.TextIOWrapper] = []

    def replace(**streams: Callable[[], io.TextIOWrapper]) -> None:
        for name, make in streams.items():
            opened.append(make())
            monkeypatch.setattr(sys, name, opened[-1])

    yield replace
    for each in opened:
        with contextlib.suppress(OSError):
            each.close()


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_commands_help_or_its_message_on_a_typo_cannot_be_written(words: tuple[str, ...], lose: Lose) -> None:
    call = partial(app, [*words, "--help"], prog_name="tether")
    lose(stdout=unread)
    assert exit_code(call) == 141
    lose(stdout=full)
    assert exit_code(call) == 2
    for make in (unread, full):
        lose(stdout=make, stderr=make)
        assert exit_code(partial(app, [*words, "--no-such-option"], prog_name="tether")) == 2


def run(function: Callable[[], object]) -> int:
    """The exit code of a command that does `function`."""
    group = typer.Typer()
    command.command(group, "x", any_home=True)(lambda: function())
    return exit_code(partial(group, [], prog_name="tether"))


def failing() -> None:
    raise GateFailed("a gate")


def table() -> None:
    Console(width=80).print("x\n" * 100)


def finished() -> None:
    with unread_is_fine():
        command.echo("the result")


@pytest.mark.parametrize(("make", "code"), [(unread, 141), (full, 2)])
def test_a_command_whose_output_is_lost(
    make: Callable[[], io.TextIOWrapper], code: int, lose: Lose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    for function, expected in ((table, code), (lambda: print("x"), code), (finished, 0), (failing, 3)):
        lose(stdout=make)
        assert run(function) == expected
    lose(stdout=make, stderr=make)
    assert run(failing) == 3


def tether(arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """`tether ARGUMENTS` by a shell; its streams are bytes."""
    line = f"{sys.executable} -m flows.cli {arguments}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, check=False, timeout=300,
        env={**os.environ, "TETHER_HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ("runs >&-", 0),
        ("runs <&- >&- 2>&-", 0),
        ("status absent >&- 2>&-", 2),
        ("--version >/dev/full", 2),
        ("status absent 2>/dev/full", 2),
    ],
)
def test_a_process_with_closed_or_full_streams(arguments: str, code: int, tmp_path: Path) -> None:
    done = tether(arguments, tmp_path / "home")
    assert done.returncode == code and b"Traceback" not in done.stderr, done.stderr
    assert b"Exception ignored" not in done.stderr


def test_a_closed_stream_gives_its_number_to_no_file(tmp_path: Path) -> None:
    """The home's first file became standard output, and every message went into it."""
    done = tether("show-config tiny --json >&- 2>&-; ls -R \"$TETHER_HOME\" 2>/dev/null | wc -c", tmp_path / "home")
    assert done.stdout.strip() == b"0"


def test_a_locale_that_is_not_utf8_changes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "données-β.jsonl"
    bare = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = tether(f"data check {data}", tmp_path / "home", **bare)
    assert done.returncode == 2 and "données-β.jsonl" in done.stderr.decode() and b"Traceback" not in done.stderr
