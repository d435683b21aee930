"""Processes of a deployed run that die: they are noticed, and the run goes on.

`pytest -m servers -s` prints the times.
"""

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.states import Cancelling

from tasks.runs.points import read_points
from tasks.runs.status import list_runs, load_status
from tests.operations.site import (
    Local,
    Stack,
    child,
    create,
    digests,
    ended,
    environment,
    kill,
    log,
    only,
    trigger,
    working_child,
)  # fmt: skip
from tests.waiting import until

UPDATES = 60
"""PPO's, where it has to last until another pipeline is up."""
LONGER = 2 * UPDATES + 1
"""The same, where a pipeline is killed first, and that has to be noticed."""
FEW = 20
"""The same, where it has to last long enough to be killed."""

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


def test_a_killed_worker_process_is_noticed_and_the_next_run_resumes_to_the_same_digest(
    stack: Stack, client: SyncPrefectClient, local: Local
) -> None:
    first = trigger(client, updates=FEW)
    kill(working_child(client, stack.home, first))
    undisturbed = local(updates=FEW)
    crashed = child(client, first)
    assert crashed is not None
    crashed = ended(client, crashed, "its SIGKILL is noticed", 30)
    assert crashed.state is not None and crashed.state.name == "Crashed"
    first = ended(client, first, "its pipeline ends")
    assert first.state is not None and first.state.is_failed() and "checkpoint" in (first.state.message or "")
    second = ended(client, trigger(client, updates=FEW), "the next run ends")
    assert second.state is not None and second.state.is_completed(), log(client, second)
    again = child(client, second)
    assert again is not None and again.parameters["order"]["key"] == crashed.parameters["order"]["key"]
    assert digests(stack.home) == undisturbed.result()


@pytest.mark.long
def test_a_killed_pipeline_leaves_its_worker_at_work_and_the_next_one_attaches(
    stack: Stack, client: SyncPrefectClient
) -> None:
    first = trigger(client, updates=LONGER)
    ppo = working_child(client, stack.home, first)
    kill(client.read_flow_run(first.id))
    gone = ended(client, first, "the pipeline's SIGKILL is noticed", 60)
    assert gone.state is not None and gone.state.name == "Crashed"
    second = ended(client, trigger(client, updates=LONGER), "the next run ends")
    assert second.state is not None and second.state.is_completed(), log(client, second)
    assert f"attached to {stack.api.removesuffix('/api')}/runs/flow-run/{ppo.id}" in log(client, second)
    assert child(client, second) is None, "nothing was started twice"
    points = read_points(stack.home / "runs" / load_status(stack.home).run / "metrics" / "ppo.jsonl")
    assert {point["step"] for point in points} >= set(range(1, LONGER + 1)), "who attaches has the whole curve"


def test_a_crashed_pipeline_continues_as_the_same_run(stack: Stack, client: SyncPrefectClient) -> None:
    """Prefect leaves it Crashed (test_recovery.py)."""
    before = list_runs(stack.home)
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    config["ppo"]["updates"] = FEW + 2  # a key that nobody began
    run = create(client, config, retries=1)
    ppo = working_child(client, stack.home, run)
    for process in (client.read_flow_run(run.id), ppo):
        kill(process)
    until("it has continued and completed", lambda: client.read_flow_run(run.id).state_name == "Completed", 400)
    names = [state.name for state in client.read_flow_run_states(run.id)]
    assert [name for name in names if name in ("Crashed", "AwaitingRetry", "Completed")] == [
        "Crashed", "AwaitingRetry", "Completed",
    ]  # fmt: skip
    (begun,) = set(list_runs(stack.home)) - set(before)
    assert load_status(stack.home, begun).state in ("passed", "waived")
    steps = [point["step"] for point in read_points(stack.home / "runs" / begun / "metrics" / "ppo.jsonl")]
    assert len(set(steps)) == len(steps) > FEW

    def tasks() -> list[str | None]:
        return [task.state_name for task in client.read_task_runs(flow_run_filter=only(run)) if "ppo" in task.name]

    until("the page shows how it ended", lambda: "Completed" in tasks(), 60)


def test_cancelling_a_pipeline_cancels_its_worker(stack: Stack, client: SyncPrefectClient) -> None:
    run = trigger(client, updates=50 * UPDATES)
    ppo = working_child(client, stack.home, run)
    assert "CUDA_VISIBLE_DEVICES=7" in environment(ppo), "the worker says what GPU, not the deployment"
    assert "PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30" in environment(ppo), "else the server takes it for dead"
    client.set_flow_run_state(run.id, Cancelling())
    assert ended(client, run, "the pipeline is cancelled", 60).state_name == "Cancelled"
    assert ended(client, ppo, "its worker's run is cancelled", 90).state_name == "Cancelled"
    until("its home says so", lambda: load_status(stack.home).state == "interrupted", 30)
