"""Ranks on several hosts: two agents on this machine that meet at one address."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.base.errors import CheckFailed, UserError
from components.distributed.hosts import Hosts, these_hosts
from components.distributed.launching import Stopped
from tests.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This process is the first of two hosts; returns the second one's environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = {"TETHER_HOSTS": "2", "TETHER_RENDEZVOUS": address}
    for name, value in {**shared, "TETHER_HOST": "0"}.items():
        monkeypatch.setenv(name, value)
    return {**os.environ, **shared, "TETHER_HOST": "1", "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def other_host(environment: dict[str, str], *more: str, ranks: int = 2) -> Iterator["subprocess.Popen[bytes]"]:
    """What the second host runs, killed at the end."""
    command = [sys.executable, "-m", "tasks.rank_processes", "--ranks", str(ranks), "--timeout", "60", *more]
    host = subprocess.Popen(command, env=environment, cwd=ROOT)
    try:
        yield host
    finally:
        host.kill()


def has_ranks(host: "subprocess.Popen[bytes]") -> bool:
    """Return whether ranks of this host are alive."""
    for process in psutil.Process(host.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if "components.distributed.entry" in process.cmdline():
                return True
    return False


@pytest.mark.ranks
def test_two_hosts_of_one_rank_each_compute_a_stage_together(toy: Any, two_hosts: dict[str, str]) -> None:
    with other_host(two_hosts) as other:
        assert toy(ranks=2).metrics["toy/steps"] == 16.0
        assert other.wait(PATIENCE * 60) == 0


@pytest.mark.ranks
def test_the_error_of_a_rank_on_another_host_ends_the_stage(toy: Any, two_hosts: dict[str, str]) -> None:
    with other_host(two_hosts) as other:
        with pytest.raises(CheckFailed, match=r"^toy: the loss is nan\. Lower toy\.learning_rate\.$"):
            toy(ranks=2, goes_wrong="check", rank=1)
        assert other.wait(PATIENCE * 60) == 1


@pytest.mark.ranks
def test_a_host_joins_one_stage_after_the_other_and_leaves_none_before_its_first_host_does(
    toy: Any, two_hosts: dict[str, str], tmp_path: Path
) -> None:
    """Else it would join the next stage in the store of the one that rank 0 still evaluates. Stages may break down, and
    between two of them the first host may compute others for hours."""
    with other_host(two_hosts, "--every-stage") as other:
        with pytest.raises(CheckFailed):
            toy(ranks=2, goes_wrong="check", rank=1)
        last, seen = tmp_path / "out/checkpoint/toy/step-000000016.json", list[bool]()

        def look() -> None:
            if last.exists() and 6 < time.time() - last.stat().st_mtime < 9:
                seen.append(has_ranks(other))

        assert toy(ranks=2, alone=10.0, check=look).metrics["toy/steps"] == 16.0
        assert seen and all(seen)
        other.send_signal(signal.SIGTERM)
        assert other.wait(30) == 128 + signal.SIGTERM, "it waits for the next stage, and is told to stop"


@pytest.mark.ranks
def test_another_number_of_ranks_than_the_keys_does_not_compute(toy: Any, two_hosts: dict[str, str]) -> None:
    with other_host(two_hosts, ranks=4) as other:
        with pytest.raises(UserError, match=r"runtime\.ranks is 2, and the hosts have started 3"):
            toy(ranks=2)
        assert other.wait(PATIENCE * 60) != 0


@pytest.mark.ranks
def test_a_host_that_waits_for_the_others_in_vain_stops_when_it_is_told_to(toy: Any, two_hosts: dict[str, str]) -> None:
    looks = list[float]()

    def stop_after_five_seconds() -> signal.Signals | None:
        looks.append(time.monotonic())
        return signal.SIGTERM if looks[-1] - looks[0] > 5 else None

    with pytest.raises(Stopped):
        toy(ranks=2, check=stop_after_five_seconds)
    assert time.monotonic() - looks[0] < 30


def test_without_variables_there_is_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TETHER_HOSTS", "TETHER_HOST", "TETHER_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    assert these_hosts() == Hosts(1, 0, "127.0.0.1:0")


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"TETHER_HOSTS": "two"}, "TETHER_HOSTS is 'two'"),
        ({"TETHER_HOSTS": "2", "TETHER_HOST": "2", "TETHER_RENDEZVOUS": "a:1"}, "a number from 0 to 1"),
        ({"TETHER_HOSTS": "2", "TETHER_HOST": "1"}, "TETHER_RENDEZVOUS is ''"),
        ({"TETHER_HOSTS": "2", "TETHER_RENDEZVOUS": "first-host"}, "set it to host:port"),
    ],
)
def test_what_the_job_says_wrongly_is_named(
    variables: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TETHER_HOSTS", "TETHER_HOST", "TETHER_RENDEZVOUS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=says):
        these_hosts()


def test_ranks_that_do_not_spread_evenly_over_hosts_are_refused() -> None:
    assert Hosts(2, 0, "a:1").ranks_here(8) == 4
    with pytest.raises(UserError, match=r"Set runtime\.ranks to a multiple of 2"):
        Hosts(2, 0, "a:1").ranks_here(3)
