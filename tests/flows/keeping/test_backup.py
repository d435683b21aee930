"""A backup while runs go on: whatever a restored home names is there; refusals; kills."""

import fcntl
import itertools
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from components.base.errors import UserError
from components.store.store import ArtifactStore
from flows.keeping.manifest import read_manifest
from tasks.runs.status import load_status
from tests.forks import Forked
from tests.keeping import Writer, backed_up, dangling, restored
from tests.waiting import PATIENCE


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Writer:
    monkeypatch.delenv("TETHER_STORE", raising=False)
    writer = Writer(tmp_path / "home")
    writer.whole_run()
    return writer


@settings(max_examples=2, deadline=None, phases=[Phase.explicit, Phase.generate])
@example([13])
@example([0, 1, 3])
@given(st.lists(st.sampled_from([0, 1, 2, 3, 13]), min_size=3, max_size=30))
def test_a_backup_beside_a_writer_names_nothing_that_it_lacks(
    tmp_path_factory: pytest.TempPathFactory, plan: list[int]
) -> None:
    """The writer takes so many steps after each file that is copied; 13 are a whole run."""
    folder = tmp_path_factory.mktemp("beside")
    writer = Writer(folder / "home")
    writer.whole_run()

    steps = itertools.cycle(plan)

    def beside() -> None:
        for _ in range(next(steps) if writer.runs < 6 else 0):
            writer.step()

    backed_up(writer.home, folder / "backup", beside)
    restored(folder / "backup", folder / "again")
    assert dangling(folder / "again") == []
    assert load_status(folder / "again", "r001").state == "passed"


def test_the_collector_is_held_off_until_the_store_is_copied(writer: Writer, tmp_path: Path) -> None:
    held: list[bool] = []

    def look() -> None:
        with (writer.home / "store" / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)

    def parts(manifest_names: list[str]) -> int:
        return sum("/runs/" in name or "/store/" in name for name in manifest_names)

    done, _ = backed_up(writer.home, tmp_path / "backup", look)
    assert held.count(True) >= parts(list(done.manifest.files)) and held[0]
    assert held == sorted(held, reverse=True), "given back once, after the store"


def test_a_shared_store_is_backed_up_and_filled_again_without_what_the_home_has_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "shared"))
    writer = Writer(tmp_path / "home")
    run = writer.whole_run()
    digest = load_status(writer.home, run).stage("ppo").digest
    done, _ = backed_up(writer.home, tmp_path / "backup")
    objects = [name for name in done.manifest.files if "/objects/" in name]
    assert done.manifest.shared == str(tmp_path / "shared")
    assert objects and all(name.startswith("shared/") for name in objects)
    shutil.rmtree(tmp_path / "home")
    shutil.rmtree(tmp_path / "shared")
    monkeypatch.delenv("TETHER_STORE")
    with pytest.raises(UserError, match="Set TETHER_STORE to the folder or bucket"):
        restored(tmp_path / "backup", tmp_path / "home")
    monkeypatch.setenv("TETHER_STORE", str(tmp_path / "shared"))
    restored(tmp_path / "backup", tmp_path / "home")
    stage = load_status(tmp_path / "home", run).stage("ppo")
    assert stage.digest == digest and ArtifactStore(tmp_path / "home").lookup(stage.key or "", digest)
    assert (ArtifactStore(tmp_path / "home").path(digest or "") / "value").read_text() == f"ppo {run}"


def test_a_backup_is_private_and_says_what_each_file_is(writer: Writer, tmp_path: Path) -> None:
    done, said = backed_up(writer.home, tmp_path / "backup")
    files = {
        path.relative_to(tmp_path / "backup").as_posix() for path in (tmp_path / "backup").rglob("*") if path.is_file()
    }
    assert files == {*done.manifest.files, "manifest.json"} and said == []
    assert (tmp_path / "backup").stat().st_mode & 0o777 == 0o700
    assert read_manifest(tmp_path / "backup") == done.manifest
    assert not list(tmp_path.glob(".*.tmp"))


@pytest.mark.parametrize("taken", ["full", "file", "home", "nothing"])
def test_a_backup_that_cannot_be_made_is_one_sentence(
    tether_here: Any, writer: Writer, tmp_path: Path, taken: str
) -> None:
    target, home = tmp_path / "backup", writer.home
    if taken == "full":
        target.mkdir()
        (target / "mine").write_text("")
    elif taken == "file":
        target.write_text("")
    elif taken == "home":
        target = home / "backups" / "one"
    else:
        home = tmp_path / "empty"
    done = tether_here("backup", str(target), home=home)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    expected = {
        "full": "not an empty folder",
        "file": "not an empty folder",
        "home": "is inside ",
        "nothing": "nothing to back up",
    }
    assert expected[taken] in done.stderr
    assert not list(tmp_path.rglob(".*.tmp")) and not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("item", [1, 14])
def test_a_killed_backup_leaves_no_folder_and_the_next_one_is_whole(writer: Writer, tmp_path: Path, item: int) -> None:
    count = iter(range(1, 1000))

    def kill() -> None:
        if next(count) == item:
            os.kill(os.getpid(), signal.SIGKILL)

    child = Forked(target=backed_up, args=(writer.home, tmp_path / "backup", kill))
    child.start()
    child.join(PATIENCE * 60)
    assert child.exitcode == -signal.SIGKILL
    assert not (tmp_path / "backup").exists() and len(list(tmp_path.glob(".backup.*.tmp"))) == 1
    backed_up(writer.home, tmp_path / "backup")
    assert not list(tmp_path.glob(".backup.*.tmp"))
    restored(tmp_path / "backup", tmp_path / "again")
    assert dangling(tmp_path / "again") == []


def test_two_backups_into_one_folder_do_not_mix(writer: Writer, tmp_path: Path) -> None:
    begun: list[bool] = []

    def second() -> None:
        if not begun:
            begun.append(True)
            backed_up(writer.home, tmp_path / "backup")

    with pytest.raises(UserError, match="it exists, and is not an empty folder"):
        backed_up(writer.home, tmp_path / "backup", second)
    restored(tmp_path / "backup", tmp_path / "again")


def test_what_the_store_lacks_or_holds_damaged_is_said_and_the_rest_is_backed_up(
    writer: Writer, tmp_path: Path
) -> None:
    store = ArtifactStore(writer.home)
    run = load_status(writer.home, "r001")
    lost, changed = (store.lookup(run.stage(name).key or "").files["value"] for name in ("sft", "ppo"))  # type: ignore[union-attr]
    (store.objects / lost).unlink()
    (store.objects / changed).chmod(0o644)
    (store.objects / changed).write_text("other bytes")
    _, said = backed_up(writer.home, tmp_path / "backup")
    assert any(changed[:12] in each and "damaged" in each for each in said)
    assert any(lost[:12] in each and "not in the store" in each for each in said)


def test_progress_is_lines_where_there_is_no_terminal(tether_here: Any, writer: Writer, tmp_path: Path) -> None:
    done = tether_here("backup", str(tmp_path / "backup"), home=writer.home)
    assert done.returncode == 0 and "  objects 5/5" in done.stdout and "Left out: work (" in done.stdout
    manifest = json.loads((tmp_path / "backup" / "manifest.json").read_text())["backup"]
    assert f"{len(manifest['files'])} files (" in done.stdout
