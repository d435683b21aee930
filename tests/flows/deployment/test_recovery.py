"""Which crashed runs go on by themselves, on a real server. No worker runs: the tests set the states."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect import flow
from prefect.automations import AutomationCore
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Failed, Running

from flows.config.run_config import load_config, to_values
from flows.deployment import flows, recovery, register
from flows.deployment.recovery import resume_crashed
from tasks.execution.dispatch import NO_HEARTBEAT
from tests.servers import PrefectServer
from tests.waiting import until

Begin = Callable[..., FlowRun]


@pytest.fixture(scope="module")
def client(server: PrefectServer) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        yield client


@pytest.fixture(scope="module")
def begin(client: SyncPrefectClient, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    """`begin(retries=1, ...)` is a running run of the deployed pipeline."""
    home = tmp_path_factory.mktemp("home")
    for pool in ("cpu", "elsewhere"):
        register._make_pool(pool)
        register._register(flows.rlhf, pool, pool, home, {})
    register._register(flows.compute, "cpu", "cpu", home, {})

    def begin(pool: str = "cpu", **changes: float) -> FlowRun:
        config = {**to_values(load_config("tiny")), "retry_seconds": 0, **changes}
        deployment = client.read_deployment_by_name(f"rlhf/{pool}")
        run = client.create_flow_run_from_deployment(deployment.id, parameters={"config": config})
        client.set_flow_run_state(run.id, Running(), force=True)
        return run

    return begin


def end(client: SyncPrefectClient, run: FlowRun, state: "State[object]") -> None:
    client.set_flow_run_state(run.id, state, force=True)


def look(client: SyncPrefectClient, run: FlowRun) -> str | None:
    said_by_resume()
    return client.read_flow_run(run.id).state_name


@pytest.mark.servers
def test_a_crashed_run_is_scheduled_again_as_often_as_its_config_says(client: SyncPrefectClient, begin: Begin) -> None:
    """It stayed Crashed, until somebody started another one by hand."""
    run = begin(retries=2)
    for _ in range(2):
        end(client, run, Crashed(message="exited with status code -9"))
        assert look(client, run) == "AwaitingRetry"
        end(client, run, Running())
        assert look(client, run) == "Running"
    end(client, run, Crashed())
    assert look(client, run) == "Crashed"
    never = begin(retries=0)
    end(client, never, Crashed())
    assert look(client, never) == "Crashed"


@pytest.mark.servers
def test_prefect_retries_a_failed_run_but_no_crashed_one(client: SyncPrefectClient) -> None:
    """So `tether serve` does. It is not needed once this fails."""

    @flow(retries=1, retry_delay_seconds=0)
    def retried() -> None:
        """Never called: the test sets its states."""

    ends = []
    for name in ("Failed", "Crashed"):
        run = client.create_flow_run(retried, state=Running())
        client.set_flow_run_state(run.id, Failed() if name == "Failed" else Crashed())
        ends.append(client.read_flow_run(run.id).state_name)
    assert ends == ["AwaitingRetry", "Crashed"]


@pytest.mark.servers
def test_an_automation_of_prefect_restarts_a_run_without_end(client: SyncPrefectClient, begin: Begin) -> None:
    """It can't count: a run that always crashes would never end. `tether serve` counts by the run's states."""
    run = begin(retries=1)
    one = {"prefect.resource.id": f"prefect.flow-run.{run.id}"}
    trigger = EventTrigger(expect={"prefect.flow-run.Crashed"}, match=one, posture=Posture.Reactive, threshold=1)
    restart = ChangeFlowRunState(state=StateType.SCHEDULED, name="AwaitingRetry")
    client.create_automation(AutomationCore(name="restart", trigger=trigger, actions=[restart]))
    time.sleep(3)  # the server loads it
    for _ in range(3):
        end(client, run, Crashed())
        until("it is restarted", lambda: client.read_flow_run(run.id).state_name == "AwaitingRetry", 20)
        end(client, run, Running())


@pytest.mark.servers
def test_a_retry_waits_for_its_time(client: SyncPrefectClient, begin: Begin) -> None:
    run = begin(retries=2, retry_seconds=3600)
    end(client, run, Crashed())
    assert look(client, run) == "Crashed"


@pytest.mark.servers
@pytest.mark.parametrize(
    "state",
    [
        Failed(name="UserError"),
        Failed(name="GateFailed"),
        Failed(name="CheckFailed"),
        Cancelled(),
        Completed(),
    ],
    ids=lambda state: state.name,
)
def test_a_mistake_a_gate_a_check_or_a_person_is_not_overruled(
    client: SyncPrefectClient, begin: Begin, state: "State[object]"
) -> None:
    run = begin()
    end(client, run, state)
    assert look(client, run) == state.name


@pytest.mark.servers
def test_a_run_that_may_live_is_left_alone_until_it_had_time_to_say_so(
    client: SyncPrefectClient, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scheduled again it would run twice at once."""
    run = begin()
    end(client, run, Crashed(message=f"{NO_HEARTBEAT}: its worker died."))
    assert look(client, run) == "Crashed"
    monkeypatch.setattr(recovery, "DOUBT_SECONDS", 0.0)
    assert look(client, run) == "AwaitingRetry"


@pytest.mark.servers
def test_a_run_of_another_pool_and_a_stage_that_a_pipeline_ordered_are_left_alone(
    client: SyncPrefectClient, begin: Begin
) -> None:
    run = begin(pool="elsewhere")
    end(client, run, Crashed())
    assert look(client, run) == "Crashed"
    order = {"stage": "ppo", "key": "k", "run": "r", "job": {}, "inputs": {}, "parts": {}}
    ordered = client.create_flow_run_from_deployment(
        client.read_deployment_by_name("compute/cpu").id, parameters={"order": order}
    )
    end(client, ordered, Crashed())
    assert look(client, ordered) == "Crashed"


@pytest.mark.servers
def test_a_server_that_is_away_is_no_error_and_one_that_refuses_is(server: PrefectServer) -> None:
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert not said_by_resume()
    elsewhere = temporary_settings({PREFECT_API_URL: f"{server.api}/elsewhere"})
    with elsewhere, pytest.raises(PrefectHTTPStatusError, match="404"):
        said_by_resume()


def test_a_full_disk_and_a_server_that_refuses_are_each_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were repeated every ten seconds."""
    said: list[str] = []
    low: list[Path] = []

    async def refuse(pools: object, *_: object) -> None:
        raise ValueError(f"401 for {pools}")

    def report(home: Path) -> bool:
        low.append(home)
        return len(low) == 2

    monkeypatch.setattr(recovery, "CHECK_SECONDS", 0.001)
    monkeypatch.setattr(recovery, "resume_crashed", refuse)
    monkeypatch.setattr(recovery, "report_low_disk", report)
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(recovery.resume_while_served(tmp_path, ["cpu"], said.append, lambda: ()), 0.5))
    assert said == ["Crashed runs can't be retried: 401 for ['cpu']"] and low == [tmp_path] * 2


def said_by_resume() -> list[str]:
    said: list[str] = []
    asyncio.run(resume_crashed(["cpu"], said.append))
    return said
