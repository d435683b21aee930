"""Files that are whole or not there, and what killed writers leave."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from components.base.files import make_folder, replacing, sweep, whole_folder, write_whole

ROOT = Path(__file__).resolve().parents[3]


def test_what_a_killed_writer_left_is_swept_and_a_living_ones_is_not(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from components.base.files import replacing, whole_folder
with replacing(Path("deep/file.json")) as file, whole_folder(Path("folder")) as folder:
    file.write_text("half")
    (folder / "part").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.rglob("*.tmp"))) == 2
    with replacing(tmp_path / "mine") as mine, whole_folder(tmp_path / "ours") as ours:
        mine.write_text("going on")
        (tmp_path / ".someone.else.tmp").touch()
        sweep(tmp_path)
        assert mine.is_file() and ours.is_dir()
        assert sorted(path.name for path in tmp_path.rglob("*.tmp")) == sorted(
            [mine.name, ours.name, ".someone.else.tmp"]
        )
    os.remove(tmp_path / ".someone.else.tmp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "mine", "ours"]


def test_a_whole_folder_is_on_the_disk_with_all_that_is_below_it_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("components.base.files.sync", lambda path: synced.append(path.name))
    with whole_folder(tmp_path / "out") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "file").write_text("")
    assert {"below", "file"} <= set(synced) and synced[-1] == tmp_path.name


def test_sweeping_beside_a_process_that_removes_folders_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ".file.mark.1234.tmp").touch()

    def removes_both(mark: str) -> bool:
        for name in ("a", "b"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        return mark == "mark"

    monkeypatch.setattr("components.base.files.is_dead_mark", removes_both)
    sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_replaced_file_and_a_new_folder_have_their_names_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr("components.base.files.sync", lambda path: synced.append(path.name))
    make_folder(tmp_path / "a" / "b")
    assert synced == [tmp_path.name, "a"]
    write_whole(tmp_path / "a" / "b" / "file", "text")
    assert synced[2].startswith(".file.") and synced[3:] == ["b"]
    assert (tmp_path / "a" / "b" / "file").read_text() == "text"


def test_a_write_that_fails_leaves_the_old_content_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "full")

    write_whole(tmp_path / "file", "old")
    monkeypatch.setattr("components.base.files.sync", full)
    with pytest.raises(OSError, match="full"):
        write_whole(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
