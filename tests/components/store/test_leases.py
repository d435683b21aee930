"""A lock over a folder, held by real processes that die, stand still and come back."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from components.base.errors import LeaseLost
from components.base.process import is_alive, is_dead, this_process
from components.store.leases import Lease, holder, leased
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]
TTL = 1.0

HOLD = """
import pathlib, sys, time
from components.store.leases import leased
with leased(pathlib.Path(sys.argv[1]), ttl=1.0, beat=float(sys.argv[2]), poll=0.02) as lease:
    print(lease.number, flush=True)
    sys.stdin.readline()
    print(lease.is_lost(), flush=True)
"""


class Holder:
    """Another process that holds the lock from now until it is told to go on."""

    def __init__(self, folder: Path, beat: float = 0.05) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(folder), str(beat)],
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
def hold() -> Iterator[Callable[..., Holder]]:
    held: list[Holder] = []

    def begin(*arguments: object, **options: float) -> Holder:
        held.append(Holder(*arguments, **options))  # type: ignore[arg-type]
        return held[-1]

    yield begin
    for each in held:
        each.process.kill()
        each.process.communicate()


def take(folder: Path, on_wait: Callable[[], None] | None = None, ttl: float = TTL) -> tuple[Lease, float]:
    """Take the lock and give it back; the lease, and the seconds it took."""
    began = time.monotonic()
    with leased(folder, on_wait, ttl=ttl, beat=0.05, poll=0.02) as lease:
        return lease, time.monotonic() - began


def elsewhere(folder: Path, number: int, **where: str) -> None:
    """Make the holder one of another machine."""
    file = folder / f"{number:09d}.held"
    before = file.stat()
    file.write_text(json.dumps({**json.loads(file.read_text()), **where}))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_killed_holder_of_this_machine_is_followed_at_once(hold, tmp_path: Path) -> None:
    first, waits = hold(tmp_path / "key"), []

    def on_wait() -> None:
        waits.append(holder(tmp_path / "key"))
        first.process.kill()
        first.process.wait()

    lease, seconds = take(tmp_path / "key", on_wait, ttl=30)
    assert lease.number == first.number + 1 == 2
    assert len(waits) == 1 and waits[0]["pid"] == first.process.pid, "it is said once, while there is a holder"
    assert seconds < 15, "a dead process needs no time to live"


def test_a_lock_that_is_given_back_goes_to_the_waiter_and_leaves_one_file(hold, tmp_path: Path) -> None:
    first = hold(tmp_path)
    assert not first.finds_it_lost()
    first.process.wait()
    assert holder(tmp_path) is None
    for number in (2, 3, 4):
        lease, _ = take(tmp_path, lambda: pytest.fail("it was free"))
        assert lease.number == number
    assert [path.name for path in tmp_path.iterdir()] == ["000000004.free"]


@pytest.mark.parametrize("where", [{"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"host": "x", "boot": "another"}])
def test_a_holder_elsewhere_is_followed_when_its_heart_has_stood_still_for_the_time_to_live(
    hold, tmp_path: Path, where: dict[str, str]
) -> None:
    first = hold(tmp_path)
    first.process.kill()
    first.process.wait()
    elsewhere(tmp_path, 1, **where)
    os.utime(tmp_path / "000000001.held", (2**33, 2**33))  # the year 2242: clocks are not compared
    lease, seconds = take(tmp_path)
    assert lease.number == 2 and TTL < seconds < TTL + PATIENCE * 10


def test_a_holder_elsewhere_whose_heart_beats_is_waited_for(hold, tmp_path: Path) -> None:
    first = hold(tmp_path)
    elsewhere(tmp_path, 1, host="x", boot="another")
    waits: list[float] = []
    waiter = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path), "0.05"], cwd=ROOT, text=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)  # fmt: skip
    time.sleep(3 * TTL)
    assert waiter.poll() is None and not (tmp_path / "000000002.held").exists()
    assert not first.finds_it_lost() and not waits
    assert waiter.communicate(timeout=PATIENCE * 20)[0].split() == ["2", "False"]


def test_who_stood_still_and_goes_on_finds_the_lock_lost_and_takes_nothing_from_its_successor(
    hold, tmp_path: Path
) -> None:
    first = hold(tmp_path)
    first.process.send_signal(signal.SIGSTOP)
    with leased(tmp_path, ttl=TTL, beat=0.05, poll=0.02) as lease:
        first.process.send_signal(signal.SIGCONT)
        assert first.finds_it_lost()
        first.process.wait()
        assert not lease.is_lost() and lease.file.exists(), "giving back what is lost frees nothing"
        lease.check()


def test_a_lost_lease_is_said_with_what_to_do(tmp_path: Path) -> None:
    with leased(tmp_path / "ppo") as lease:
        (tmp_path / "ppo" / "000000002.held").write_text("{}")
        with pytest.raises(LeaseLost, match=r"another one took over ppo.*Run the same command again"):
            lease.check()


def test_an_outage_of_the_folder_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with leased(tmp_path, beat=0.01) as lease:
        with monkeypatch.context() as broken:
            broken.setattr(os, "utime", _fail)
            broken.setattr(os, "listdir", _fail)
            time.sleep(0.1)
            assert not lease.is_lost()
        before = lease.file.stat().st_mtime_ns
        until("the heart goes on", lambda: lease.file.stat().st_mtime_ns > before, 5)


def _fail(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def test_a_clock_that_is_set_back_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(10**9, 0, -1))
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    with leased(tmp_path, beat=0.01) as lease:
        seen = []
        while len(seen) < 10:
            now = lease.file.stat().st_mtime_ns
            seen += [now] if now not in seen else []
            time.sleep(0.002)
    assert seen[1:] == sorted(seen[1:])


def test_a_waiter_that_slept_gives_the_holder_time_to_show_its_heart(tmp_path: Path, monkeypatch) -> None:
    """A sleeping machine stops both: on waking, the waiter must not count the night as the holder's silence."""
    from components.store.leases import _Heartbeat

    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with leased(tmp_path, beat=600):
        watch = _Heartbeat(ttl=60, longest=2)
        assert not watch.is_over(tmp_path, 1)
        now[0] += 8 * 3600
        assert not watch.is_over(tmp_path, 1)
        for _ in range(30):
            now[0] += 2
            over = watch.is_over(tmp_path, 1)
        assert over, "but a minute of looks is a minute"


STRESS = """
import os, pathlib, random, sys, time
from components.store.leases import leased
folder, chance = pathlib.Path(sys.argv[1]), random.Random(sys.argv[2])
for _ in range(15):
    with leased(folder / "lease", poll=0.001, beat=0.5) as lease:
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
    all_ = [
        subprocess.Popen([sys.executable, "-c", STRESS, str(tmp_path), str(n)], cwd=ROOT, stderr=subprocess.PIPE)
        for n in range(6)
    ]
    assert [process.communicate(timeout=PATIENCE * 100)[1] for process in all_] == [b""] * 6
    assert (tmp_path / "counter").read_text() == "90"
    numbers = [int(line) for line in (tmp_path / "numbers").read_text().split()]
    assert numbers == sorted(set(numbers)), "tokens only rise"
    assert len(list((tmp_path / "lease").iterdir())) == 1


def test_a_number_that_was_used_is_not_made_again_by_a_late_comer(tmp_path: Path) -> None:
    """Seen as the highest, then superseded and cleaned up: the late file is withdrawn."""
    from components.store.leases import _create

    (tmp_path / "000000007.held").write_text("{}")
    assert not _create(Lease(tmp_path, 6))
    (tmp_path / "000000007.held").rename(tmp_path / "000000007.free")
    assert not _create(Lease(tmp_path, 7))
    assert [path.name for path in tmp_path.iterdir()] == ["000000007.free"]
    assert _create(Lease(tmp_path, 8)) and not _create(Lease(tmp_path, 8))


def test_a_draft_of_a_killed_process_goes_with_the_next_holder_and_one_of_another_machine_when_it_is_old(
    tmp_path: Path,
) -> None:
    killed = "import os, pathlib, sys; os.link = lambda *_: os.kill(os.getpid(), 9)\n" + HOLD.strip()
    subprocess.run([sys.executable, "-c", killed, str(tmp_path), "0.05"], cwd=ROOT)
    [draft] = tmp_path.iterdir()
    young, old = tmp_path / ".000000001.held.0-1-1.a.tmp", tmp_path / ".000000001.held.0-1-1.b.tmp"
    for path in (young, old):
        path.write_text("{}")
    os.utime(old, (0, 0))
    take(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [young.name, "000000001.free"], draft


def test_who_is_dead_for_certain() -> None:
    me = this_process()
    gone = {**me, "started": "1"}
    assert is_dead(gone) and not is_alive(gone) and not is_dead(me)
    assert is_dead({**gone, "host": "renamed since"})
    for other in ({"boot": "another"}, {"pid_namespace": "pid:[1]"}, {"boot": ""}):
        assert not is_dead({**gone, **other})
    assert not is_dead({"host": me["host"], "pid": me["pid"], "started": "1"}), "written before boots were"
    assert not is_alive({**me, "boot": "another"}), "a run of before the restart is over"
    assert is_alive({**me, "pid_namespace": "pid:[1]"})
