"""Queues of the work pools: who comes first, what people have set stays, and PPO waits in its pipeline's queue."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.flow_engine import run_flow
from prefect.settings import PREFECT_API_URL, temporary_settings

from components.base.errors import UserError
from components.store.store import ArtifactStore
from flows.config.run_config import load_config
from flows.deployment.register import deploy
from tasks.execution import dispatch
from tasks.execution.computing import Work
from tasks.execution.keying import key_of
from tasks.stages import STAGES
from tests.servers import PrefectServer

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def client(server: PrefectServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SyncPrefectClient]:
    """Of a server to which the profile tiny is deployed as `queued`."""
    with pytest.MonkeyPatch.context() as patch, temporary_settings({PREFECT_API_URL: server.api}):
        patch.setenv("PREFECT_API_URL", server.api)
        deploy(tmp_path_factory.mktemp("home"), "queued", load_config("tiny"), None)
        with get_client(sync_client=True) as client:
            yield client


def ordered(client: SyncPrefectClient, queue: str | None) -> FlowRun:
    """A run of the pipeline in a queue; None means the deployment's own."""
    deployment = client.read_deployment_by_name("rlhf/queued")
    return client.create_flow_run_from_deployment(deployment.id, work_queue_name=queue)


def priorities(client: SyncPrefectClient, pool: str) -> dict[str, int | None]:
    return {each.name: each.priority for each in client.read_work_queues(work_pool_name=pool)}


def test_a_later_run_in_the_queue_high_is_taken_before_an_earlier_one(client: SyncPrefectClient) -> None:
    first, urgent = ordered(client, None), ordered(client, "high")
    taken = client.get_scheduled_flow_runs_for_work_pool("cpu")  # as a worker without --work-queue asks
    assert [each.flow_run.id for each in taken if each.flow_run.id in (first.id, urgent.id)] == [urgent.id, first.id]
    assert first.work_queue_name == "default"


def test_deploying_again_leaves_queues_limits_and_the_pipelines_queue_as_people_set_them(
    client: SyncPrefectClient, tmp_path: Path
) -> None:
    assert priorities(client, "cpu") == priorities(client, "gpu") == {"high": 1, "default": 2}
    high = client.read_work_queue_by_name("high", work_pool_name="gpu")
    client.update_work_queue(high.id, concurrency_limit=3)
    config = load_config("tiny")
    with pytest.raises(UserError, match=r"--queue hihg: the pool cpu has no such queue\. It has high, default\."):
        deploy(tmp_path, "queued", config, None, queue="hihg")
    for queue in ("high", None):
        deploy(tmp_path, "queued", config, None, queue=queue)
        assert client.read_deployment_by_name("rlhf/queued").work_queue_name == "high"
    assert client.read_work_queue(high.id).concurrency_limit == 3
    assert priorities(client, "cpu") == priorities(client, "gpu") == {"high": 1, "default": 2}


@pytest.mark.parametrize(("queue", "there"), [("high", "high"), ("night", "default")])
def test_an_order_waits_in_its_pipelines_queue_and_makes_none_where_its_pool_lacks_that(
    client: SyncPrefectClient, tmp_path: Path, queue: str, there: str
) -> None:
    store, stage = ArtifactStore(tmp_path), STAGES["validate"]
    job = load_config("tiny").resolved().stage_job(stage)
    key, parts = key_of(stage, job, {})
    work = Work(stage, job, {}, f"{uuid4().hex}{key}", parts, "r")

    @flow(persist_result=False)
    def pipeline(profile: str, config: dict[str, Any]) -> str:
        return str(dispatch._start(work, "gpu", store, refresh=False, attempt=1).work_queue_name)

    run = ordered(client, queue)
    assert run_flow(pipeline, flow_run=client.read_flow_run(run.id), parameters={}) == there
    assert set(priorities(client, "gpu")) == {"high", "default"}
