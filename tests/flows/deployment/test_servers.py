"""What `tether ui` and `tether serve` do where a part of them ends. (With real servers: tests/operations/.)"""

import os
import sys
import time
from pathlib import Path

import pytest

from flows.deployment import servers, supervision
from flows.deployment.servers import serve_pools
from flows.deployment.supervision import Service, Supervised
from tests.waiting import until

STEADY = "import time; time.sleep(60)"


def python(name: str, code: str) -> Service:
    return Service(name, "here", [sys.executable, "-c", code])


def test_a_part_that_dies_is_started_again_later_each_time_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of one part ended all of them, and a PPO of hours with the worker of another pool."""
    monkeypatch.setattr(supervision, "AGAIN_SECONDS", (0.05, 0.1))
    monkeypatch.setattr(servers, "LOOK_SECONDS", 0.01)
    pids = tmp_path / "pids"
    note = f"import os; open({str(pids)!r}, 'a').write(f'{{os.getpid()}}\\n'); "
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if len([line for line in said if "is restarted" in line]) == 3:
            until("the steady one has begun", lambda: (tmp_path / "steady").exists() and steady() in began(), 20)
            assert began().count(steady()) == 1
            os.kill(int(steady()), 0)  # it still runs, and is the first
            raise KeyboardInterrupt

    def began() -> list[str]:
        return pids.read_text().split()

    def steady() -> str:
        return (tmp_path / "steady").read_text()

    kept = f"import os; open({str(tmp_path / 'steady')!r}, 'w').write(str(os.getpid())); {note}{STEADY}"
    servers._serve([python("steady", kept), python("dies", f"{note}raise SystemExit(3)")], tmp_path, say)
    again = [line for line in said if "is restarted" in line]
    assert [line.split(" in ")[1].split(" s")[0] for line in again] == ["0", "0", "0"]
    assert all(line.startswith("dies ended with code 3") and str(tmp_path / "dies.log") in line for line in again)
    assert len(began()) == 1 + 3, "the steady one once, the other three times"
    with pytest.raises(ProcessLookupError):
        os.kill(int(steady()), 0)


def test_the_wait_before_a_part_is_started_again_doubles_up_to_a_limit_and_falls_back_when_it_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "AGAIN_SECONDS", (0.01, 0.04))
    said: list[str] = []
    part = Supervised(python("dies", "raise SystemExit(0)"), tmp_path / "dies.log")
    waits = []
    for number in range(5):
        if number == 4:
            monkeypatch.setattr(supervision, "STEADY_SECONDS", -1.0)
        while len(said) <= number:
            part.look(said.append)
            time.sleep(0.005)
        assert part._due is not None
        waits.append(part._wait)
    assert waits == [0.02, 0.04, 0.04, 0.04, 0.02]


def test_each_worker_takes_a_limited_number_of_runs_and_names_its_gpu_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool without a limit started everything that was queued at once."""
    started: list[Service] = []
    monkeypatch.setattr(servers, "_serve", lambda services, *_, **__: started.extend(services))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    serve_pools(tmp_path, {"cpu": 2, "gpu": 1}, print)
    limits = [service.command[-2:] for service in started if service.command]
    assert limits == [["--limit", "2"], ["--limit", "1"]]
    assert [service.name for service in started] == ["worker-cpu-1", "worker-gpu-1"]


@pytest.mark.parametrize(("set_", "asks"), [(None, "3"), ("1", "1")])
def test_a_worker_asks_for_runs_as_often_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch, set_: str | None, asks: str
) -> None:
    monkeypatch.delenv("PREFECT_WORKER_QUERY_SECONDS", raising=False)
    if set_ is not None:
        monkeypatch.setenv("PREFECT_WORKER_QUERY_SECONDS", set_)
    (worker,) = servers.worker_services({"cpu": 1})
    assert worker.environment["PREFECT_WORKER_QUERY_SECONDS"] == asks


def test_what_a_worker_prints_goes_where_its_parent_prints_when_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Containers of one pool, which share a home, had one log file between them, and nothing for the engine's log."""
    monkeypatch.setattr(supervision, "AGAIN_SECONDS", (0.05, 0.1))
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        if "is restarted" in text:
            raise KeyboardInterrupt

    service = python("prints", "print('heard', flush=True)")
    servers._serve([service], tmp_path, say, logs=False)
    assert "heard" in capfd.readouterr().out and list(tmp_path.iterdir()) == []
    assert said[-1].endswith("is restarted in 0 s")
