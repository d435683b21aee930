"""A lock on a file, held by real processes that die or are cut off from the file's server."""

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.base.errors import LeaseLost, UserError
from components.store.leases import is_held, leased
from components.store.store import ArtifactStore
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]

HOLD = """
import pathlib, sys, time
from components.store.leases import leased
with leased(pathlib.Path(sys.argv[1])) as lease:
    print(lease.number, flush=True)
    sys.stdin.readline()
    print(lease.is_lost(), flush=True)
"""


class Holder:
    """Another process that holds the lock from now until it is told to go on."""

    def __init__(self, path: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.number = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def finds_it_lost(self) -> bool:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.line() == "True"


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "work" / "key.lock"


@pytest.fixture
def hold(lock: Path) -> Iterator[Callable[[], Holder]]:
    holders: list[Holder] = []

    def begin() -> Holder:
        holders.append(Holder(lock))
        return holders[-1]

    yield begin
    for holder in holders:
        holder.process.kill()
        holder.process.communicate()


def cut_off(lock: Path) -> None:
    """Free the lock of a holder that goes on, as a file server does with that of a machine that it can't reach."""
    shutil.copy(lock, lock.with_suffix(".copy"))
    os.replace(lock.with_suffix(".copy"), lock)


def test_a_killed_holder_is_followed_at_once(hold: Callable[[], Holder], lock: Path) -> None:
    first, waits = hold(), []

    def on_wait() -> None:
        waits.append(is_held(lock))
        threading.Timer(0.2, first.process.kill).start()

    with leased(lock, on_wait) as lease:
        assert lease.number == first.number + 1 == 2
    assert waits == [True], "it is said once, while there is a holder"


def test_a_lock_that_is_given_back_leaves_one_file(hold: Callable[[], Holder], lock: Path) -> None:
    first = hold()
    assert is_held(lock) and not first.finds_it_lost()
    first.process.wait()
    assert not is_held(lock)
    for number in (2, 3, 4):
        with leased(lock, lambda: pytest.fail("it was free")) as lease:
            assert lease.number == number and is_held(lock)
    assert list(lock.parent.iterdir()) == [lock] and not is_held(lock)


def test_who_was_cut_off_finds_the_lock_lost(hold: Callable[[], Holder], lock: Path) -> None:
    first = hold()
    cut_off(lock)
    with leased(lock, lambda: pytest.fail("it was free")) as lease:
        assert first.finds_it_lost()
        first.process.wait()
        assert not lease.is_lost() and is_held(lock), "giving back what is lost frees nothing"
        lease.check()


def test_who_holds_a_lock_whose_file_was_removed_has_lost_it(lock: Path) -> None:
    with leased(lock):
        pass
    with leased(lock) as lease:
        lock.unlink()
        with leased(lock) as second:
            assert lease.is_lost() and not second.is_lost() and second.number < lease.number


def test_a_key_that_release_0_1_0_computes_is_refused_and_its_dead_lock_removed(tmp_path: Path) -> None:
    store, held = ArtifactStore(tmp_path), tmp_path / "work" / "k.leases" / "000000007.held"
    held.parent.mkdir(parents=True)
    held.touch()
    with pytest.raises(UserError, match=r"a run of Tether 0\.1\.0 computes this"), store.lock("k"):
        pass
    with store.if_free("k") as free:
        assert not free and store.held_keys() == {"k"}
    os.utime(held, (0, 0))
    with store.lock("k"):
        assert store.held_keys() == {"k"} and not held.parent.exists()


def test_a_lost_lease_is_said_with_what_to_do(lock: Path) -> None:
    with leased(lock) as lease:
        lock.write_text("000000002\n")
        with pytest.raises(LeaseLost, match=r"another process took over key.*Run the same command again"):
            lease.check()


def test_an_outage_of_the_folder_is_no_loss(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with leased(lock) as lease:
        with monkeypatch.context() as broken:
            broken.setattr(os, "open", fail)
            assert not lease.is_lost()
        lock.unlink()
        assert lease.is_lost()


@pytest.mark.parametrize("text", ["", "-5", "[" * 100_000, "no number"])
def test_a_damaged_lock_file_is_counted_from_one(lock: Path, text: str) -> None:
    lock.parent.mkdir()
    lock.write_text(text)
    with leased(lock) as lease:
        assert lease.number == 1 and not lease.is_lost()
    with leased(lock) as lease:
        assert lease.number == 2


def test_a_file_system_without_locks_is_named(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(UserError, match=r"work: this file system has no file locks.*TETHER_HOME"), leased(lock):
        pytest.fail("it was locked")


STRESS = """
import os, pathlib, random, sys, time
from components.store.leases import leased
folder, chance = pathlib.Path(sys.argv[1]), random.Random(sys.argv[2])
for _ in range(15):
    with leased(folder / "lease") as lease:
        try:
            os.close(os.open(folder / "inside", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            sys.exit("two inside at once")
        counter = int((folder / "counter").read_text())
        time.sleep(chance.random() * 0.004)
        (folder / "counter").write_text(str(counter + 1))
        with (folder / "numbers").open("a") as file:
            file.write(f"{lease.number}\\n")
        os.unlink(folder / "inside")
"""


def test_of_many_processes_one_at_a_time_is_inside(tmp_path: Path) -> None:
    (tmp_path / "counter").write_text("0")
    processes = [
        subprocess.Popen([sys.executable, "-c", STRESS, str(tmp_path), str(n)], cwd=ROOT, stderr=subprocess.PIPE)
        for n in range(6)
    ]
    assert [process.communicate(timeout=PATIENCE * 100)[1] for process in processes] == [b""] * 6
    assert (tmp_path / "counter").read_text() == "90"
    numbers = [int(line) for line in (tmp_path / "numbers").read_text().split()]
    assert numbers == list(range(1, 91))
