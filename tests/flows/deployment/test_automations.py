"""Which flow runs a Prefect server sets to Crashed, with a real server and short times. The tests beat for the runs."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow, tags
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.events.schemas.events import RelatedResource
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    get_current_settings,
    temporary_settings,
)
from prefect.states import Completed, Running

from flows import rlhf
from flows.config.run_config import load_config, to_values
from flows.deployment.automations import DEAD, notice_dead_runs
from flows.sources import Sources
from tasks.execution.context import RunContext
from tasks.execution.dispatch import taken_for_dead
from tasks.prefect_flow.alive import saying_that_it_lives
from tasks.prefect_flow.server import HEARTBEAT_SECONDS, TAG
from tasks.runs.run_label import Label
from tests.servers import PrefectServer
from tests.waiting import until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(600)]

SECONDS = 10.0
"""Prefect's shortest time for such a trigger."""


@pytest.fixture(scope="module")
def client(server: PrefectServer) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        notice_dead_runs(SECONDS)
        time.sleep(2)  # the server loads them
        yield client


@flow(name="somebody-elses")
def somebody_elses() -> None:
    """Never called: its runs are made by hand."""


def begin(client: SyncPrefectClient, *tags: str) -> FlowRun:
    return client.create_flow_run(somebody_elses, tags=tags, state=Running())


def beat(run: FlowRun) -> None:
    """What a flow run's process sends, as `prefect.flow_engine` makes it."""
    related = [{"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"} for tag in run.tags]
    emit_event(
        "prefect.flow-run.heartbeat",
        {"prefect.resource.id": f"prefect.flow-run.{run.id}"},
        related=[RelatedResource.model_validate(each) for each in related],
    )


@pytest.fixture
def beating(server: PrefectServer) -> Iterator[Callable[[FlowRun], None]]:
    """`beating(run)` sends the run's heartbeat every second until the test is over."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def go_on(run: FlowRun) -> None:
        with temporary_settings({PREFECT_API_URL: server.api}):
            while not over.wait(1):
                beat(run)

    def start(run: FlowRun) -> None:
        threads.append(threading.Thread(target=go_on, args=(run,), daemon=True))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


def state(client: SyncPrefectClient, run: UUID) -> str | None:
    return client.read_flow_run(run).state_name


def test_a_silent_run_of_ours_crashes_and_nobody_elses_does(
    client: SyncPrefectClient, beating: Callable[[FlowRun], None]
) -> None:
    """Another team's flow was set to Crashed after 90 s: it beats every 180 s, and the automation matched it too."""
    dead, lives, ended, other = begin(client, TAG), begin(client, TAG, "x"), begin(client, TAG), begin(client, "x")
    last_heard = time.time()
    for run in (dead, ended, other):
        beat(run)
    beating(lives)
    client.set_flow_run_state(ended.id, Completed(name="AwaitingLabels"))
    until("the silent run has crashed", lambda: state(client, dead.id) == "Crashed", SECONDS + 5)
    crashed = client.read_flow_run(dead.id)
    assert crashed.state is not None and crashed.state.timestamp.timestamp() >= last_heard + SECONDS
    assert taken_for_dead(crashed)
    time.sleep(3)
    assert [state(client, run.id) for run in (lives, ended, other)] == ["Running", "AwaitingLabels", "Running"]


def test_a_run_that_lives_is_running_again_after_the_server_took_it_for_dead(
    server: PrefectServer, client: SyncPrefectClient
) -> None:
    """As a server does that was away: its next heartbeat is due after 30 s, and the server waits for 10 s."""
    ids: list[str] = []

    def seen() -> list[str]:
        found = [each.name for each in client.read_flow_run_states(UUID(ids[0]))]
        return [name for name in found if name != "Pending"]

    @flow(name="ours")
    def ours() -> None:
        ids.append(str(flow_run.id))
        with saying_that_it_lives(ids[0], every=0.5):
            until("it was taken for dead and is running", lambda: seen()[1:] == ["Crashed", "Running"], SECONDS + 4)

    settings = {PREFECT_API_URL: server.api, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS}
    with temporary_settings(settings), tags(TAG):
        ours()
    assert seen() == ["Running", "Crashed", "Running", "Completed"]


def test_an_automation_of_an_earlier_deployment_is_replaced_and_a_paused_one_stays_paused(
    client: SyncPrefectClient,
) -> None:
    """The old one matched every flow run on the server."""
    (known,) = client.read_automations_by_name(DEAD)
    client.pause_automation(known.id)
    notice_dead_runs(SECONDS, tag="another")
    (found,) = client.read_automations_by_name(DEAD)
    assert "prefect.tag.another" in found.trigger.model_dump_json() and not found.enabled


def test_a_run_from_a_terminal_is_tagged_and_beats_as_often_as_a_deployed_one(
    server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had Prefect's 180 s, and the automation asks for a heartbeat every 90 s."""
    found: list[object] = []

    def look(*_: object) -> None:
        found.extend([sorted(flow_run.tags), get_current_settings().flows.heartbeat_frequency])

    monkeypatch.setattr(rlhf, "pipeline", look)
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    config = load_config("tiny").resolved()
    ctx = RunContext.start(
        tmp_path, "tiny", config.effective_gates, config=to_values(config), label=Label.of(None, ["team=x"])
    )
    rlhf.rlhf(config, Sources(), ctx)
    assert found == [["team=x", TAG], HEARTBEAT_SECONDS]
