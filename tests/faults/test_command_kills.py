"""SIGKILL within commands that change a home, but for a run: the same command again ends as if undisturbed."""

import json
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tasks.runs.journal import Sent
from tests.champions import make_champion
from tests.faults.homes import Home, Moment, tail
from tests.faults.sample import SEED
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.faults, pytest.mark.timeout(PATIENCE * 900)]

KILLS = {"iterate": 10}
"""Of each command; 6 where none is named."""


class Command(NamedTuple):
    """A command with what comes before it and what must be there after it."""

    prepare: Callable[[Home], tuple[str, ...]]
    """Makes the copy of the undisturbed home what the command works on; returns its arguments."""
    ends_as: Callable[[Home], Any]
    """What two homes must have in common in which it was run."""
    done_before: str = ""
    """What the command says, with exit code 2, where the kill came when all of it was done."""


def _export(home: Home) -> tuple[str, ...]:
    return ("store", "export", home.status()["run"], "--to", str(home.path.parent / "out.tar"))


def _exported(home: Home) -> Any:
    return sorted(path.name for path in home.path.parent.iterdir()), (home.path.parent / "out.tar").read_bytes()


def _import(home: Home) -> tuple[str, ...]:
    assert home.tether(*_export(home)).code == 0
    shutil.rmtree(home.path)
    return ("store", "import", str(home.path.parent / "out.tar"))


def _files(home: Home) -> Any:
    home.check()
    folders = (home.path / "store", home.path / "runs")
    return sorted(str(path.relative_to(home.path)) for folder in folders for path in folder.rglob("*"))


def _collect(home: Home) -> tuple[str, ...]:
    shutil.rmtree(home.path / "runs")
    (home.path / "mlflow.db").unlink()
    old = time.time() - 2 * 3600
    for path in (home.path / "store" / "objects").iterdir():
        os.utime(path, (old, old))
    return ("store", "gc", "--keep-runs", "0")


def _promote(home: Home) -> tuple[str, ...]:
    make_champion(home.path)
    assert home.tether("promote", "tether-policy/1", "--remove", "--reason", "a test").code == 0
    return ("promote", "tether-policy/1", "--reason", "again")


def _promoted(home: Home) -> Any:
    tags = "select key from model_version_tags order by key"
    return rows(home, "select name, alias, version from registered_model_aliases order by alias"), rows(home, tags)


def _sync(home: Home) -> tuple[str, ...]:
    (home.path / "mlflow.db").unlink()
    shutil.rmtree(home.path / "mlartifacts")
    Sent(project="tether").save(home.path / "runs" / home.status()["run"])
    return ("sync",)


def _sent(home: Home) -> Any:
    runs = "select name, status from runs where lifecycle_stage = 'active' order by name"
    metrics = "select name, key, step from metrics join runs using (run_uuid) where lifecycle_stage = 'active'"
    aliases = "select name, alias, version from registered_model_aliases order by alias"
    return rows(home, runs), sorted(set(rows(home, metrics))), rows(home, aliases), home.tether("sync").output


def _iterate(home: Home) -> tuple[str, ...]:
    return ("iterate", home.status()["run"])


def _iterated(home: Home) -> Any:
    """The round and votes of each run that came to its end, and the newest run's digests."""
    home.check()
    runs = [json.loads(path.read_text()) for path in home.path.glob("runs/*/run.json")]
    ended = [run["origin"] for run in runs if run["stages"][-1]["state"] in ("passed", "cached")]
    rounds = {(origin.get("round", "0"), origin.get("votes", "")) for origin in ended}
    assert sorted(number for number, _ in rounds) == ["0", "1"]
    return rounds, home.digests()


COMMANDS = {
    "export": Command(_export, _exported, "already exists"),
    "import": Command(_import, _files),
    "gc": Command(_collect, _files),
    "promote": Command(_promote, _promoted),
    "sync": Command(_sync, _sent),
    "iterate": Command(_iterate, _iterated),
}


def rows(home: Home, query: str) -> list[Any]:
    """What the database of MLflow holds."""
    with closing(sqlite3.connect(home.path / "mlflow.db")) as database:
        return database.execute(query).fetchall()


@pytest.fixture(scope="module")
def clean(whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """How a command ends of which nothing was killed, and how many moments it has."""
    known: dict[str, Any] = {}

    def run(name: str) -> Any:
        if name not in known:
            home, arguments = prepared(whole[0], COMMANDS[name], tmp_path_factory.mktemp(name))
            trace = home.path.with_name("trace")
            done = home.tether(*arguments, plan={"command": None, "trace": str(trace)})
            assert done.code == 0, tail(done)
            moments = int(trace.read_text())
            trace.unlink()
            known[name] = moments, COMMANDS[name].ends_as(home)
        return known[name]

    return run


def prepared(whole: Home, command: Command, folder: Path) -> tuple[Home, tuple[str, ...]]:
    home = whole.copy(folder / "home")
    return home, command.prepare(home)


@pytest.mark.parametrize(
    ("name", "nth"),
    [
        pytest.param(name, nth, id=f"{name}-{nth}", marks=pytest.mark.kind(f"killed {name}"))
        for name in COMMANDS for nth in range(KILLS.get(name, 6))
    ],
)
def test_a_command_killed_at_any_moment_ends_the_same_when_it_is_run_again(
    name: str, nth: int, whole: tuple[Home, list[Moment]], clean: Callable[[str], Any], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    moments, expected = clean(name)
    at = random.Random(f"{SEED} {name} {nth}").randint(1, moments)
    home, arguments = prepared(whole[0], COMMANDS[name], tmp_path)
    killed = home.tether(*arguments, plan={"command": at})
    assert killed.code == -9 or at > 0.9 * moments, f"{name} at {at} of {moments}: {tail(killed)}"
    again = home.tether(*arguments)
    all_done = COMMANDS[name].done_before
    assert again.code == 0 or (all_done and again.code == 2 and all_done in again.output), tail(again)
    assert COMMANDS[name].ends_as(home) == expected, f"{name} killed at {at} of {moments}"
    record_property("outcome", [f"killed {name}", f"change {at} of {moments}", "completed", f"{again.seconds:.0f}"])
