"""A run's own Prefect server: started, ended, and done without where it can't start."""

import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE

import psutil
import pytest

from components.gates.judging import GatesConfig
from tasks.execution.context import Reporting, RunContext
from tasks.prefect_flow.server import NoServer, is_answering, no_answer, own_server
from tasks.prefect_flow.start_flow import run_as_flow
from tests.waiting import until

pytest.importorskip("prefect")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def servers(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children() if "create_app" in str(child.cmdline())]


@pytest.mark.whole
def test_it_answers_in_a_session_of_its_own_and_is_gone_afterwards() -> None:
    with own_server() as url:
        with own_server() as shared:
            assert shared == url
        assert os.environ["PREFECT_API_URL"] == url and no_answer(f"{url}/health") is None
        [server] = servers(psutil.Process())
        assert os.getsid(server.pid) == server.pid != os.getsid(0)
    assert no_answer(f"{url}/health") and "PREFECT_API_URL" not in os.environ
    assert not server.is_running()


@pytest.mark.whole
def test_runs_that_share_a_server_start_another_when_it_has_died(home: Path) -> None:
    """A sweep ended with the first cell after its server's death."""
    with ExitStack() as server:
        for _ in range(2):
            ctx = RunContext.start(home, "tiny", GatesConfig(), reporting=Reporting(track=False))
            with ctx:
                assert run_as_flow(ctx, lambda runner: None, server) is None
            [process] = servers(psutil.Process())
            process.kill()
            process.wait()


@pytest.mark.whole
def test_it_ends_when_its_run_is_killed() -> None:
    code = "from tasks.prefect_flow.server import own_server\nwith own_server():\n print('begun', flush=True); input()"
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdin=PIPE, stdout=PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "begun\n"
        [server] = servers(psutil.Process(run.pid))
        run.kill()
        until("the server ends", lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE)


@pytest.mark.whole
def test_one_that_cannot_start_is_said_with_its_reason(home: Path) -> None:
    (home / "prefect").mkdir()
    (home / "prefect" / "prefect.db").write_bytes(b"no database" * 1000)
    with pytest.raises(NoServer, match="startup failed"), own_server():
        pytest.fail("it started")


def test_one_that_is_slow_is_waited_for_no_longer_than_asked() -> None:
    with pytest.raises(NoServer, match=r"no answer within 0 s"), own_server(seconds=0.2):
        pytest.fail("it started")


@contextmanager
def answering(answer: Callable[[str], int]) -> Iterator[str]:
    """The API's address of a server that gives each path the status that `answer` says."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer(self.path))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/api/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(("status", "answers"), [(200, True), (401, True), (404, True), (500, False), (503, False)])
def test_a_server_whose_database_is_away_counts_as_away(
    status: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health was asked, which is fine without a database; then a stage's task met a 500, and ended the run."""
    with answering(lambda path: 200 if path == "/api/health" else status) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert is_answering(patience=0) is answers
    assert not is_answering(), "and one that is gone is away too"


def test_a_busy_server_is_asked_again_and_one_that_was_away_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow machine stages were missing on their pages: the server had said once that its database is away."""
    codes, asked = iter([503, 503, 200, 503, 503, 503]), list[int]()

    def answer(path: str) -> int:
        asked.append(next(codes))
        return asked[-1]

    with answering(answer) as url:
        monkeypatch.setenv("PREFECT_API_URL", url)
        assert is_answering(patience=600) and asked == [503, 503, 200]
        assert not is_answering(patience=0) and len(asked) == 4
        assert not is_answering(patience=600) and len(asked) == 5, "the run does not wait at each line"
