"""No damaged file of a home makes a command fail without a reason, or breaks what another run's commands show."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from typer.testing import CliRunner

from flows.cli.__main__ import app
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
    "earlier sent": "runs/{run}/tracking.json",
    "pin": "store/pins/{run}.json",
    "record": "store/records/*/1.ppo.json",
    "first record": "store/records/*/1.validate.json",
    "store lock": "store/.lock",
    "view lock": "store/.views.lock",
    "lease": "work/*/000000001.free",
    "server note": "prefect/embedded/1.json",
    "form": "home.json",
    "database": "mlflow.db",
    "database lock": "mlflow.lock",
}
"""Every kind of file that a home has, and one of each."""
PARSED = {"status", "config", "sent", "done", "points", "pin", "record"}
READING = (
    ("runs",), ("runs", "--json"), ("status",), ("status", "{run}"), ("status", "{run}", "--json"),
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
def two_runs(whole: tuple[Home, list[Moment]], tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("damaged") / "home"
    clone(whole[0].path, path)
    (run,) = (each.name for each in (path / "runs").iterdir())
    assert call(path, "run", "tiny").exit_code == 0
    assert call(path, "store", "pin", run).exit_code == 0
    (other,) = {each.name for each in (path / "runs").iterdir()} - {run}
    (path / "runs" / run / "tracking.json").write_text('{"facts": 2}')
    (path / "prefect" / "embedded").mkdir(parents=True)
    (path / "prefect" / "embedded" / "1.json").write_text('{"owner": {"host": "gone"}, "servers": []}')
    return Whole(path, run, other)


def clone(home: Path, target: Path) -> None:
    """Copy a home; what is never written in place is linked."""

    def copy(source: str, to: str) -> None:
        linked = "/store/objects/" in source or "/mlartifacts/" in source
        os.link(source, to) if linked else shutil.copyfile(source, to)

    shutil.copytree(home, target, symlinks=True, copy_function=copy)


def call(home: Path, *arguments: str) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TETHER_HOME", str(home))
        patch.delenv("PREFECT_API_URL", raising=False)
        patch.chdir(home.parent)
        return CliRunner().invoke(app, list(arguments))


def damaged(whole: Whole, target: Path, kind: str, how: str) -> tuple[Path, Callable[..., Any]]:
    """A copy of the home with one file damaged; returns the file, and what calls a command there."""
    clone(whole.path, target)
    path = next(target.glob(KINDS[kind].format(run=whole.run)))
    data = DAMAGE[how](path.read_bytes())
    path.unlink()
    path.write_bytes(data)

    def run(*arguments: str) -> Any:
        return call(target, *(each.format(run=whole.run, other=whole.other) for each in arguments))

    return path, run


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
    two_runs: Whole, tmp_path: Path, kind: str, how: str
) -> None:
    path, run = damaged(two_runs, tmp_path / "home", kind, how)
    for arguments in READING:
        check(run(*arguments), path, f"{how}: {' '.join(arguments)}")
    for arguments in OTHERS:
        done = run(*arguments)
        check(done, path, f"{how}: {' '.join(arguments)}")
        # The runs have the database in common, and that record of a model.
        shared = kind == "database" or (kind == "record" and arguments[0] == "export")
        assert done.exit_code == 0 or shared, f"{how}: {' '.join(arguments)}: {done.output}"


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_run_and_what_changes_a_home_go_on_beside_a_damaged_file(
    two_runs: Whole, tmp_path: Path, tether: Tether, kind: str
) -> None:
    how = _drawn(kind)
    path, run = damaged(two_runs, tmp_path / how, kind, how)
    for arguments in WRITING:
        computes = arguments[0] == "run" and kind in COMPUTED
        done = Ended.of(tether(*arguments, home=tmp_path / how)) if computes else run(*arguments)
        check(done, path, f"{how}: {' '.join(arguments)}")
        assert done.exit_code == 0 or arguments[0] not in ("run", "status"), f"{how}: {done.output}"


class Ended(NamedTuple):
    """How a command in a process of its own ended, as `CliRunner` says it."""

    exit_code: int
    output: str
    exception: None = None

    @classmethod
    def of(cls, done: subprocess.CompletedProcess[str]) -> "Ended":
        return cls(done.returncode, done.stdout + done.stderr)


def check(done: Any, path: Path, what: str) -> None:
    """The command ended well, or with an error that names the file."""
    assert done.exit_code in (0, 2), f"{what}: {done.exit_code} {done.output} {done.exception!r}"
    assert "Traceback" not in done.output, f"{what}: {done.output}"
    named = path.name in done.output or path.parent.name[:16] in done.output  # a record goes by its key
    assert done.exit_code == 0 or named, f"{what}: {done.output}"


def test_all_that_a_run_names_in_its_home_is_on_the_disk_first(whole: tuple[Home, list[Moment]]) -> None:
    log = whole[0].path.with_name(NOT_SYNCED)
    assert (log.read_text() if log.exists() else "") == ""
