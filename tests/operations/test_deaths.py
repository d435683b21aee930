"""Processes of a deployed run that die: they are noticed, and the run goes on.

`pytest -m servers -s` prints the times.
"""

import subprocess
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Cancelling

from components.store.store import ArtifactStore
from tasks.runs.points import read_points
from tasks.runs.status import list_runs, load_status
from tests.operations.site import (
    BIN,
    ROOT,
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
)
from tests.waiting import until

UPDATES = 60
"""PPO's, where it has to last until another pipeline is up."""
LONGER = 2 * UPDATES + 1
"""The same, where a pipeline is killed first, and that has to be noticed."""
FEW = 20
"""The same, where it has to last long enough to be killed."""

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def silent(stack: Stack, client: SyncPrefectClient) -> tuple[FlowRun, FlowRun]:
    """A pipeline, and its PPO whose process and worker were killed."""
    page = stack.blocks[1].replace("deploy tiny", "deploy tiny --pool spare")
    subprocess.run(["bash", "-c", f"set -e\n{page}"], cwd=ROOT, env=stack.environment, check=True)
    with (stack.logs / "spare.log").open("wb") as out:
        worker = subprocess.Popen(
            [BIN / "prefect", "worker", "start", "--pool", "spare", "--type", "process"],
            env={**stack.environment, "PREFECT_API_URL": stack.api}, stdout=out, stderr=out,
        )  # fmt: skip
    try:
        config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
        config["ppo"]["updates"] = 50 * UPDATES + 1  # a key that nobody began
        config["runners"]["ppo"]["pool"] = "spare"
        run = create(client, config)
        ppo = working_child(client, stack, run)
    finally:
        worker.kill()
        worker.wait()
    kill(ppo)
    return run, ppo


@pytest.mark.long
def test_a_worker_that_dies_with_its_process_leaves_a_run_that_seems_to_go_on(
    client: SyncPrefectClient, silent: tuple[FlowRun, FlowRun]
) -> None:
    run, ppo = (client.read_flow_run(each.id) for each in silent)
    assert run.state is not None and run.state.is_running() and ppo.state is not None and ppo.state.is_running()


def test_a_killed_worker_process_is_noticed_and_the_next_run_resumes_to_the_same_digest(
    stack: Stack, client: SyncPrefectClient, local: Local
) -> None:
    first = trigger(client, updates=FEW)
    kill(working_child(client, stack, first))
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
    ppo = working_child(client, stack, first)
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
    working_child(client, stack, run)
    kill(client.read_flow_run(run.id))
    until("it has continued and completed", lambda: client.read_flow_run(run.id).state_name == "Completed", 400)
    names = [state.name for state in client.read_flow_run_states(run.id)]
    assert [name for name in names if name in ("Crashed", "AwaitingRetry", "Completed")] == [
        "Crashed", "AwaitingRetry", "Completed",
    ]  # fmt: skip
    (begun,) = set(list_runs(stack.home)) - set(before)
    assert load_status(stack.home, begun).state in ("passed", "waived")


def test_cancelling_a_pipeline_cancels_its_worker(stack: Stack, client: SyncPrefectClient) -> None:
    run = trigger(client, updates=50 * UPDATES)
    ppo = working_child(client, stack, run)
    assert "CUDA_VISIBLE_DEVICES=7" in environment(ppo), "the worker says what GPU, not the deployment"
    client.set_flow_run_state(run.id, Cancelling())
    assert ended(client, run, "the pipeline is cancelled", 60).state_name == "Cancelled"
    assert ended(client, ppo, "its worker's run is cancelled", 90).state_name == "Cancelled"
    until("its home says so", lambda: load_status(stack.home).state == "interrupted", 30)


@pytest.mark.long
def test_a_retried_run_takes_up_the_run_it_began_and_computes_nothing_twice(
    stack: Stack, client: SyncPrefectClient, silent: tuple[FlowRun, FlowRun]
) -> None:
    before = load_status(stack.home)  # it has every result that comes before PPO
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    config["ppo"]["updates"] = FEW + 1  # a key that nobody began
    run = create(client, config, from_stage="reward")
    ppo = working_child(client, stack, run)
    kill(ppo)
    run = ended(client, run, "its pipeline ends")
    begun = load_status(stack.home)
    assert [s.state for s in begun.stages] == ["cached", "cached", "passed", "failed", "not_run"]
    computed, runs = attempts(stack.home), list_runs(stack.home)
    retry = [BIN / "prefect", "flow-run", "retry", str(run.id)]
    subprocess.run(retry, env={**stack.environment, "PREFECT_API_URL": stack.api}, check=True)

    def retried() -> FlowRun | None:
        found = client.read_flow_run(run.id)
        return found if found.run_count > run.run_count and found.state and found.state.is_final() else None

    run = until("the retried run ends", retried, 300)
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert list_runs(stack.home) == runs, "no second run is left beside the first"
    after = load_status(stack.home)
    assert after.run == begun.run
    assert [s.state for s in after.stages] == ["cached", "cached", "cached", "passed", "passed"]
    assert [s.digest for s in after.stages][:3] == [s.digest for s in before.stages][:3]
    keys = {s.key for s in after.stages[:3]}
    assert {key: number for key, number in attempts(stack.home).items() if key in keys} == {
        key: number for key, number in computed.items() if key in keys
    }
    steps = [point["step"] for point in read_points(stack.home / "runs" / after.run / "metrics" / "ppo.jsonl")]
    assert len(set(steps)) == len(steps) > FEW

    def shown() -> bool:
        tasks = client.read_task_runs(flow_run_filter=only(run))
        return "Completed" in [task.state_name for task in tasks if "ppo" in task.name]

    until("the page shows how it ended", shown, 60)


def attempts(home: Path) -> dict[str, int]:
    """How often each key was computed."""
    store = ArtifactStore(home)
    return {entry.name: len(store.attempts(entry.name)) for entry in (home / "store" / "records").iterdir()}


@pytest.mark.long
def test_a_dead_workers_run_is_noticed_by_its_silence(
    client: SyncPrefectClient, silent: tuple[FlowRun, FlowRun]
) -> None:
    """The last test: the silence lasts while the others run."""
    run, ppo = silent
    ppo = ended(client, ppo, "the rest of a dead worker's silence", 120)
    assert ppo.state is not None and ppo.state.name == "Crashed" and "its worker died" in (ppo.state.message or "")
    run = ended(client, run, "its pipeline ends")
    assert run.state is not None and run.state.is_failed() and "checkpoint" in (run.state.message or "")
