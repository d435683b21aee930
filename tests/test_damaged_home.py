"""No damaged file of a home makes a command fail without a reason, or breaks what another run's commands show."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.conftest import Tether
from tests.faults.homes import NOT_SYNCED, Home, Moment

pytestmark = [pytest.mark.timeout(1200), pytest.mark.faults, pytest.mark.kind("damaged file")]

DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "emptied": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "a list": lambda data: b"[]",
    "null": lambda data: b"null",
    "a number": lambda data: b"5",
    "binary": lambda data: bytes(range(256)) * 3,
}

KINDS = {
    "status": "runs/{run}/run.json",
    "config": "runs/{run}/config.yaml",
    "sent": "runs/{run}/mlflow.json",
    "sent lock": "runs/{run}/mlflow.lock",
    "done": "runs/{run}/done/ppo.json",
    "points": "runs/{run}/metrics/ppo.jsonl",
    "card": "runs/{run}/cards/tether-policy.md",
    "report": "runs/{run}/report.html",
    "terminal report": "runs/{run}/report.md",
    "pin": "store/pins/{run}.json",
    "record": "store/records/*/1.ppo.json",
    "first record": "store/records/*/1.validate.json",
    "store lock": "store/.lock",
    "view lock": "store/.views.lock",
    "key lock": "work/*.lock",
    "form": "home.json",
    "database": "mlflow.db",
    "database lock": "mlflow.lock",
}
"""Every kind of file that a home has, and one of each."""
PARSED = {"status", "config", "sent", "done", "points", "pin", "record"}
READING = (
    ("runs", "--json"), ("status",), ("status", "{run}"), ("status", "{run}", "--json"),
    ("status", "{run}", "--why"), ("status", "{run}", "--why", "--json"), ("lineage", "{run}"),
    ("lineage", "{run}", "--json"), ("diff", "{run}", "{other}"), ("export", "{run}", "--card"),
    ("status", "{run}", "--html"), ("store", "ls"), ("store", "ls", "--json"), ("store", "gc", "--dry-run"),
)  # fmt: skip
OTHERS = (
    ("status", "{other}"), ("status", "{other}", "--why"), ("lineage", "{other}"), ("export", "{other}", "--card"),
    ("runs",),
)  # fmt: skip
"""What never fails: it is about a run whose files are whole."""
WRITING = (("sync",), ("store", "gc"), ("run", "tiny"), ("status",), ("sync",))
COMPUTED = {"record", "first record"}
"""Kinds without which a stage is computed again, with Prefect: not in pytest's own process, where it leaves threads."""


class Whole(NamedTuple):
    """A home with two runs, the second of which found all in the store."""

    path: Path
    run: str
    other: str


@pytest.fixture(scope="module")
def two_runs(tether_here: Tether, whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("damaged") / "home"
    clone(whole[0].path, path)
    (run,) = (each.name for each in (path / "runs").iterdir())
    for command in (("run", "tiny"), ("store", "pin", run)):
        assert tether_here(*command, home=path).returncode == 0
    (other,) = {each.name for each in (path / "runs").iterdir()} - {run}
    return Whole(path, run, other)


def clone(home: Path, target: Path) -> None:
    """Copy a home; what is never written in place is linked."""

    def copy(source: str, to: str) -> None:
        linked = "/store/objects/" in source or "/mlartifacts/" in source
        os.link(source, to) if linked else shutil.copyfile(source, to)

    shutil.copytree(home, target, symlinks=True, copy_function=copy)


def damaged(whole: Whole, target: Path, kind: str, how: str) -> Path:
    """Copy the home to `target` with one file damaged; returns the file."""
    clone(whole.path, target)
    path = next(target.glob(KINDS[kind].format(run=whole.run)))
    data = DAMAGE[how](path.read_bytes())
    path.unlink()
    path.write_bytes(data)
    return path


def _drawn(kind: str) -> str:
    """One way for each kind of file, and all ways among the kinds."""
    return list(DAMAGE)[list(KINDS).index(kind) % len(DAMAGE)]


def _cases() -> Iterator[Any]:
    """Each kind of file damaged in one way; those that are parsed in every way."""
    for kind in KINDS:
        for how in DAMAGE if kind in PARSED else [_drawn(kind)]:
            yield pytest.param(kind, how, id=f"{kind}, {how}")


@pytest.mark.parametrize(("kind", "how"), list(_cases()))
def test_a_damaged_file_is_named_or_made_again_and_breaks_no_other_runs_commands(
    two_runs: Whole, tmp_path: Path, tether_here: Tether, kind: str, how: str
) -> None:
    path = damaged(two_runs, tmp_path / "home", kind, how)
    for arguments in (*READING, *OTHERS):
        command = [each.format(run=two_runs.run, other=two_runs.other) for each in arguments]
        done = tether_here(*command, home=tmp_path / "home")
        check(done, path, how)
        # The runs have the database in common, and that record of a model.
        shared = kind == "database" or (kind == "record" and arguments[0] == "export")
        assert done.returncode == 0 or shared or arguments not in OTHERS, f"{how}: {done}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_run_and_what_changes_a_home_go_on_beside_a_damaged_file(
    two_runs: Whole, tmp_path: Path, tether: Tether, tether_here: Tether, kind: str
) -> None:
    how = _drawn(kind)
    path = damaged(two_runs, tmp_path / how, kind, how)
    for arguments in WRITING:
        computes = arguments[0] == "run" and kind in COMPUTED
        done = (tether if computes else tether_here)(*arguments, home=tmp_path / how)
        check(done, path, how)
        assert done.returncode == 0 or arguments[0] not in ("run", "status"), f"{how}: {done}"


def check(done: subprocess.CompletedProcess[str], path: Path, how: str) -> None:
    """The command ended well, or with an error that names the file."""
    output = done.stdout + done.stderr
    assert done.returncode in (0, 2) and "Traceback" not in output, f"{how}: {done}"
    named = path.name in output or path.parent.name[:16] in output  # a record goes by its key
    assert done.returncode == 0 or named, f"{how}: {done}"


def test_all_that_a_run_names_in_its_home_is_on_the_disk_first(whole: tuple[Home, list[Moment]]) -> None:
    log = whole[0].path.with_name(NOT_SYNCED)
    assert (log.read_text() if log.exists() else "") == ""
