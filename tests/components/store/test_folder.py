"""Two users share a store, each with a umask that lets nobody else read."""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.base.errors import UserError
from components.store.folder import FolderPlace
from tests.forks import Forked
from tests.waiting import PATIENCE

USERS = (20_001, 20_002)


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that everybody may write to, on the way to which nobody is stopped."""
    if os.geteuid() != 0:
        pytest.skip("only root can be two users")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def as_user(user: int, work: Callable[[], None]) -> None:
    """Do `work` in a process of `user` with umask 077; it must not raise."""

    def run() -> None:
        os.setgid(user)
        os.setgroups([])
        os.setuid(user)
        os.umask(0o077)
        work()

    process = Forked(target=run)
    process.start()
    process.join(PATIENCE * 60)
    assert process.exitcode == 0


def test_what_one_user_writes_with_umask_077_the_other_reads_and_adds_to(shared: Path) -> None:
    place = FolderPlace(shared)

    def first() -> None:
        with place.using():
            assert place.create("records/key/1.json", b"one")
            with place.writing("objects/sha") as temporary:
                temporary.write_bytes(b"bytes")

    def second() -> None:
        with place.using():
            assert place.read("records/key/1.json") == b"one" and place.read("objects/sha") == b"bytes"
            assert [entry.name for entry in place.entries("records")] == ["key/1.json"]
            assert not place.create("records/key/1.json", b"two")
            assert place.create("records/key/2.json", b"two")

    as_user(USERS[0], first)
    as_user(USERS[1], second)
    as_user(USERS[0], lambda: place.remove("records/key/2.json"))


def test_the_lock_of_one_user_holds_back_the_other_one_that_collects(shared: Path) -> None:
    place = FolderPlace(shared)

    def uses() -> None:
        with place.using(), (shared / ".lock").open("a") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def collects() -> None:
        with place.collecting():
            pass

    as_user(USERS[0], collects)
    as_user(USERS[1], uses)
    as_user(USERS[1], collects)


def test_a_folder_of_a_group_stays_closed_to_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    FolderPlace(tmp_path).create("records/key/1.json", b"one")
    assert {oct(each.stat().st_mode & 0o7777) for each in (tmp_path / "records", tmp_path / "records" / "key")} == {
        "0o2770"
    }


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_by_name(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(UserError, match=rf"{tmp_path}: this file system has no hard links.*TETHER_STORE"):
        FolderPlace(tmp_path).create("records/a/1.toy.json", b"{}")
    assert not list((tmp_path / "records" / "a").iterdir()), "nothing half-written remains"
