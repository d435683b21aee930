"""For each file of tests, servers and workers of its own."""

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings

from tests.operations.site import BIN, Local, Stack, digests, end
from tests.servers import clean_environment
from tests.waiting import PATIENCE, until


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("operations"))
    pages = stack.terminal(0, go_on=True)
    try:
        until("both servers are up", lambda: "Ctrl-C" in stack.said(0))
        deployed = stack.terminal(1)
        assert deployed.wait(PATIENCE * 120) == 0, stack.said(1)
        workers = stack.terminal(2, go_on=True)
        try:
            until("workers are started", lambda: "Ctrl-C" in stack.said(2))
            yield stack
        finally:
            end("the workers have ended", workers)
    finally:
        end("both servers have ended", pages)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: stack.api}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def local(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """`local(**changes)` has all of the pipeline run in one process, in another home, with `ppo` keys changed: its
    digests, once it ended."""
    home = tmp_path_factory.mktemp("local") / "home"
    # An embedded server takes 13 s a command.
    environment = {**clean_environment(), "PREFECT_API_URL": stack.api, "TETHER_HOME": str(home)}

    def run(settings: list[str]) -> list[str]:
        command = [BIN / "tether", "run", "tiny", *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return digests(home)

    with ThreadPoolExecutor(1) as pool:
        yield lambda **changes: pool.submit(run, [f"--set=ppo.{name}={value}" for name, value in changes.items()])
