"""A deployed run, PPO on a worker, whose Prefect server is away for a while: it goes on and ends as without."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.settings import PREFECT_API_URL, temporary_settings

from components.models.runtime import Runtime
from components.store.store import ArtifactStore
from tasks.runs.journal import Sent
from tasks.runs.points import points_file, read_points
from tasks.runs.status import RunStatus, load_status
from tasks.tracking.mlflow_client import connect
from tests.operations.site import create, ended, log, trigger, working_child
from tests.servers import PrefectServer, Proxy, clean_environment
from tests.waiting import PATIENCE, until

ROOT = Path(__file__).resolve().parent.parent
REAL = os.environ.get("TETHER_REAL_OUTAGES") == "1"
"""Whether the outages last as long as those that were seen: minutes, longer than a run may be silent."""

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


class Site:
    """A server, a proxy before it, and workers that know the proxy alone."""

    def __init__(self, folder: Path) -> None:
        self.home, self.folder = folder / "home", folder
        self.server = PrefectServer(folder).start()
        self.proxy = Proxy(self.server.port)
        self.environment = {
            **clean_environment(), "TETHER_HOME": str(self.home), "PYTHONPATH": str(ROOT),
            "PREFECT_HOME": str(folder / "client"), "PREFECT_WORKER_QUERY_SECONDS": "1",
            "PREFECT_API_URL": f"http://127.0.0.1:{self.proxy.port}/api",
        }  # fmt: skip

    def tether(self, *arguments: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{arguments[0]}.log").open("wb") as log:
            command = [sys.executable, "-m", "flows.cli", *arguments]
            return subprocess.Popen(command, env=self.environment, cwd=self.folder, stdout=log, stderr=log)

    def said(self, command: str) -> str:
        return (self.folder / f"{command}.log").read_text()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("site"))
    try:
        assert site.tether("deploy", "tiny").wait(PATIENCE * 180) == 0, site.said("deploy")
        serving = site.tether("serve")
        try:
            yield site
        finally:
            serving.terminate()
            until("tether serve has ended", lambda: serving.poll() is not None, 60)
    finally:
        site.proxy.shutdown()
        site.proxy.server_close()
        site.server.stop()


@pytest.fixture(scope="module")
def client(site: Site) -> Iterator[SyncPrefectClient]:
    """Asks the server itself, which is always there."""
    with temporary_settings({PREFECT_API_URL: site.server.api}), get_client(sync_client=True) as client:
        yield client


def completed(client: SyncPrefectClient, *runs: FlowRun) -> bool:
    """Whether they have; a server that heard nothing from them calls them `Crashed` until they say that they live."""
    return all(client.read_flow_run(run.id).state_name == "Completed" for run in runs)


@pytest.mark.parametrize(
    ("how", "seconds", "updates"),
    [("database", 51 if REAL else 10, 30), pytest.param("gone", 110 if REAL else 10, 31, marks=pytest.mark.long)],
)
def test_a_run_goes_on_while_its_server_is_away_and_ends_completed(
    site: Site, client: SyncPrefectClient, how: Literal["gone", "database"], seconds: float, updates: int
) -> None:
    run = trigger(client, updates=updates)
    ppo = working_child(client, site.home, run)
    site.proxy.fall(how)
    time.sleep(seconds)
    site.proxy.rise()
    until("both are completed", lambda: completed(client, run, ppo), 120)
    status = load_status(site.home)
    assert status.state in ("passed", "waived")
    local = read_points(points_file(site.home / "runs" / status.run, "ppo"))
    steps = [point["step"] for point in local if "ppo/kl" in point["metrics"]]
    assert steps == sorted(set(steps)) and len(steps) >= updates
    sent = Sent.load(site.home / "runs" / status.run).stages["ppo"]
    recorded = [point.step for point in connect(site.home).get_metric_history(sent, "ppo/kl")]
    assert recorded[: len(steps)] == steps and len(recorded) <= len(steps) + 1, "each once, and the final value"
    time.sleep(5)
    assert completed(client, run, ppo), "no late word of the server's changes that"


@pytest.mark.long
def test_a_pool_computes_ppo_on_two_ranks_and_gives_it_back_once(site: Site, client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    runtime = Runtime(device="cpu", dtype="float32", threads=1, ranks=2).resolve()
    config["runners"] = config.get("runners", {}) | {"ppo": {"pool": "gpu", "runtime": runtime.model_dump(mode="json")}}
    config["ppo"] |= {"updates": 4}

    def finished() -> RunStatus:
        run = ended(client, create(client, config), "the run ends", 800)
        assert run.state_name == "Completed", log(client, run)
        return load_status(site.home)

    first = finished()
    ppo, store = first.stage("ppo"), ArtifactStore(site.home)
    (record,) = store.published(ppo.key)
    assert record.job["runtime"]["ranks"] == 2 and record.job["runtime"]["sharding"] == "zero2"
    assert ppo.state in ("passed", "waived") and ppo.gates, "judged as ever"
    local = read_points(points_file(site.home / "runs" / first.run, "ppo"))
    steps = [point["step"] for point in local if "ppo/kl" in point["metrics"]]
    assert steps[:4] == [1, 2, 3, 4] and steps == sorted(set(steps)), "each once"
    again = finished().stage("ppo")
    assert (again.state, again.key, again.digest) == ("cached", ppo.key, ppo.digest)
    config["runners"]["ppo"]["runtime"] |= {"ranks": 1, "sharding": "none"}
    alone = finished().stage("ppo")
    assert alone.key != ppo.key, "another number of ranks rounds differently"
