"""A restore: nothing or the whole, and nothing over what is there."""

import json
import os
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.hashing import digest_json
from flows.keeping.manifest import read_manifest
from tasks.runs.schema import HOME_SCHEMA
from tasks.runs.status import load_status
from tests.forks import Forked
from tests.keeping import Writer, backed_up, dangling, restored
from tests.waiting import PATIENCE


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a home, in which a run has ended and one is at work, and its backup."""
    folder = tmp_path_factory.mktemp("made")
    writer = Writer(folder / "home")
    writer.whole_run()
    for _ in range(4):
        writer.step()
    backed_up(writer.home, folder / "backup")
    return folder


@pytest.fixture
def home(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that home, with its backup beside it."""
    monkeypatch.delenv("TETHER_STORE", raising=False)
    for name in ("home", "backup"):
        shutil.copytree(made / name, tmp_path / name, symlinks=True)
    return tmp_path / "home"


def test_a_run_that_was_at_work_is_interrupted_in_the_restored_home(home: Path, tmp_path: Path) -> None:
    assert load_status(home, "r002").state == "running"
    restored(tmp_path / "backup", tmp_path / "again")
    again = load_status(tmp_path / "again", "r002")
    assert again.state == again.stage("sft").state == "interrupted"
    assert load_status(tmp_path / "again", "r001").as_json() == load_status(home, "r001").as_json()


@pytest.mark.parametrize("name", ["home/runs/r001/run.json", "home/mlflow.db", "object", "manifest.json"])
@pytest.mark.parametrize("how", ["changed", "missing"])
def test_a_damaged_backup_is_one_sentence_with_the_files_name_and_changes_nothing(
    tether_here: Any, home: Path, tmp_path: Path, name: str, how: str
) -> None:
    path = tmp_path / "backup" / name
    if name == "object":
        path = sorted((tmp_path / "backup" / "home/store/objects").iterdir())[-1]
    data = path.read_bytes()
    path.chmod(0o644)
    path.unlink() if how == "missing" else path.write_bytes(data.replace(b"s", b"t", 1))
    done = tether_here("restore", str(tmp_path / "backup"), home=tmp_path / "again")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert path.name in done.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["backup", "home"]


def test_a_home_that_is_not_empty_is_refused_with_the_way_out(tether_here: Any, home: Path, tmp_path: Path) -> None:
    before = sorted(home.rglob("*"))
    done = tether_here("restore", str(tmp_path / "backup"), home=home)
    assert done.returncode == 2 and "is not empty" in done.stderr and "Move it away" in done.stderr
    assert sorted(home.rglob("*")) == before
    (tmp_path / "again").mkdir()
    done = tether_here("restore", str(tmp_path / "backup"), home=tmp_path / "again")
    assert done.returncode == 0 and dangling(tmp_path / "again") == [], done.stderr


@pytest.mark.parametrize("item", [9, 30])
def test_a_killed_restore_leaves_no_home_and_the_next_one_is_whole(home: Path, tmp_path: Path, item: int) -> None:
    count = iter(range(1, 1000))

    def kill() -> None:
        if next(count) == item:
            os.kill(os.getpid(), signal.SIGKILL)

    child = Forked(target=restored, args=(tmp_path / "backup", tmp_path / "again", kill))
    child.start()
    child.join(PATIENCE * 60)
    assert child.exitcode == -signal.SIGKILL and not (tmp_path / "again").exists()
    restored(tmp_path / "backup", tmp_path / "again")
    assert dangling(tmp_path / "again") == []
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "backup", "home"], "drafts are gone"


def test_a_home_with_a_damaged_run_is_kept_as_it_is(home: Path, tmp_path: Path) -> None:
    (home / "runs" / "r001" / "run.json").write_text("{}")
    backed_up(home, tmp_path / "second")
    restored(tmp_path / "second", tmp_path / "again")
    assert (tmp_path / "again" / "runs" / "r001" / "run.json").read_text() == "{}"
    assert load_status(tmp_path / "again", "r002").state == "interrupted"


def test_records_keep_their_times_and_files_their_permissions(home: Path, tmp_path: Path) -> None:
    restored(tmp_path / "backup", tmp_path / "again")
    for path in (home / "store").rglob("*.json"):
        other = tmp_path / "again" / path.relative_to(home)
        assert abs(other.stat().st_mtime - path.stat().st_mtime) < 1e-3
        assert other.stat().st_mode == path.stat().st_mode


def test_in_another_place_artifacts_of_mlflow_are_looked_for_there(home: Path, tmp_path: Path) -> None:
    places = [home.as_uri() + "/mlartifacts/1", str(home / "mlartifacts"), "s3://elsewhere/1", f"{home}2/mlartifacts"]
    with closing(sqlite3.connect(home / "mlflow.db")) as database, database:
        database.execute("create table runs (artifact_uri text)")
        database.executemany("insert into runs values (?)", [(place,) for place in places])
    done = home / "runs" / "r001" / "done"
    done.mkdir()
    (done / "sft.json").write_text(json.dumps({"path": f"{home}/store/views/1", "other": f"{home}2/x"}))
    backed_up(home, tmp_path / "second")
    shutil.rmtree(home)
    again = tmp_path / "again"
    restored(tmp_path / "second", again)
    with closing(sqlite3.connect(again / "mlflow.db")) as database:
        found = [uri for (uri,) in database.execute("select artifact_uri from runs")]
    assert found == [again.as_uri() + "/mlartifacts/1", str(again / "mlartifacts"), *places[2:]]
    told = json.loads((again / "runs" / "r001" / "done" / "sft.json").read_text())
    assert told == {"path": f"{again}/store/views/1", "other": f"{home}2/x"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": HOME_SCHEMA + 1}, r"newer Tether .*Install"),
        ({"home_schema": HOME_SCHEMA + 1}, r"newer Tether .*Install"),
        ({"files": {"home/../../planted": {"size": 0, "sha256": "0" * 64, "modified": 0}}}, "is damaged"),
    ],
    ids=["newer backup", "newer home", "a path outside"],
)
def test_a_backup_of_a_newer_tether_or_with_paths_outside_is_refused(
    home: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    path = tmp_path / "backup" / "manifest.json"
    body = json.loads(path.read_text())["backup"] | change
    path.write_text(json.dumps({"backup": body, "sha256": digest_json(body)}))
    with pytest.raises(UserError, match=said):
        restored(tmp_path / "backup", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_manifest_of_any_size_is_not_read_whole(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text("{}")
    os.truncate(tmp_path / "manifest.json", 1 << 40)
    with pytest.raises(UserError, match=r"is damaged .*more than 536,870,912 bytes"):
        read_manifest(tmp_path)
