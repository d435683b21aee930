"""How `tether ui` and `tether serve` end, and what they end. (With real servers: tests/operations/.)"""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest

from components.base.errors import TetherError
from flows.deployment import local_servers
from flows.deployment.local_servers import PageServer, serve_pages, worker_environment
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parents[3]


def server(name: str, code: str) -> PageServer:
    return PageServer(name, "here", "http://127.0.0.1:9/health", [sys.executable, "-c", code])


def test_a_page_server_that_ends_ends_the_command_and_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = f"import subprocess, sys; c = subprocess.Popen(['sleep', '60']); open({str(tmp_path / 'pid')!r}, 'w')"
    monkeypatch.setattr(local_servers, "_mlflow", lambda home: server("MLflow", f"{child}.write(str(c.pid)); c.wait()"))
    monkeypatch.setattr(local_servers, "_prefect", lambda: server("Prefect", "print('no disk'); raise SystemExit(3)"))
    no_answer = partial(until, "MLflow has a child", lambda: pid() != "", 20)
    monkeypatch.setattr(local_servers, "no_answer", lambda *_, **__: no_answer())

    def pid() -> str:
        return (tmp_path / "pid").read_text() if (tmp_path / "pid").exists() else ""

    with pytest.raises(TetherError, match=r"Prefect ended with code 3; see .*prefect\.log"):
        serve_pages(tmp_path, lambda text: None)
    assert (tmp_path / "prefect.log").read_text() == "no disk\n"
    until("MLflow's child has ended", lambda: not psutil.pid_exists(int(pid())), 20)


@pytest.mark.parametrize(("set_", "asks"), [(None, "3"), ("1", "1")])
def test_a_worker_asks_for_runs_as_often_as_the_user_says(
    monkeypatch: pytest.MonkeyPatch, set_: str | None, asks: str
) -> None:
    monkeypatch.setattr(os, "environ", {} if set_ is None else {"PREFECT_WORKER_QUERY_SECONDS": set_})
    worker_environment()
    assert os.environ["PREFECT_WORKER_QUERY_SECONDS"] == asks


SERVE = """
import asyncio, sys
from contextlib import suppress
from pathlib import Path
import anyio
from prefect.workers import process
from flows.deployment.local_servers import serve_pools
RUN = '''
import signal, sys, time
def stop(*_):
    time.sleep(1)
    print("checkpoint", flush=True)
    sys.exit()
signal.signal(signal.SIGTERM, stop)
print("run", flush=True)
time.sleep(60)
'''
class Worker:
    def __init__(self, work_pool_name, limit):
        self.pool, self.limiter = work_pool_name, anyio.CapacityLimiter(limit)
    async def start(self, printer):
        if self.pool == "gone":
            await asyncio.sleep(3)
            raise RuntimeError("Service exceeded error threshold.")
        self.limiter.acquire_on_behalf_of_nowait(self)
        run = await asyncio.create_subprocess_exec(sys.executable, "-c", RUN, start_new_session=True)
        await run.wait()
        self.limiter.release_on_behalf_of(self)
        while True:
            await asyncio.sleep(0.3)
            with suppress(anyio.WouldBlock):
                self.limiter.acquire_on_behalf_of_nowait(self)
                print("another run", flush=True)
process.ProcessWorker = Worker
serve_pools(Path(), {pool: 1 for pool in sys.argv[1:]}, lambda text: print(text, flush=True))
"""
"""`tether serve` with workers that each have one run, which takes a second to write its checkpoint."""


def serving(*pools: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", SERVE, *pools]
    # A shell that runs the tests in the background has its children ignore SIGINT.
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_serve_told_to_stop_lets_its_runs_write_their_checkpoints(number: signal.Signals) -> None:
    """Prefect's worker kills them."""
    process = serving("cpu")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    assert lines == ["worker of pool cpu: 1 at a time\n", "Ctrl-C stops them.\n", "run\n"]
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE * 30)
    assert (process.returncode, out, err) == (0, "checkpoint\n", "")


def test_a_worker_that_ends_stops_the_runs_of_the_others_in_order() -> None:
    process = serving("cpu", "gone")
    out, err = process.communicate(timeout=PATIENCE * 60)
    assert out.endswith("run\ncheckpoint\n") and process.returncode == 1
    assert "a worker ended: Service exceeded error threshold. Start `tether serve` again." in err
