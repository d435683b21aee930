"""docs/operations/local.md with real processes on loopback: servers, workers, a schedule, a run from its page."""

import json
import subprocess
import urllib.request
from pathlib import Path

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, DeploymentFilter, DeploymentFilterId
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError

from flows.config.run_config import load_config, to_values
from tasks.runs.status import RunStatus, load_status
from tests.components.evaluation.local_tasks import write_task
from tests.flows.test_evaluation import probe
from tests.operations.site import ROOT, Local, Stack, child, create, digests, ended, log, tasks_of, trigger
from tests.waiting import PATIENCE, until

pytestmark = [pytest.mark.servers, pytest.mark.timeout(1800)]

STAGES = ("validate", "sft", "reward", "ppo", "human_eval")


def test_a_schedule_fires_and_ppo_runs_on_the_other_worker_with_a_local_runs_digests(
    stack: Stack, client: SyncPrefectClient, local: Local
) -> None:
    undisturbed = local()
    page = stack.blocks[1].replace("'0 3 * * 1'", "'* * * * *' --active")
    subprocess.run(["bash", "-c", f"set -e\n{page}"], cwd=ROOT, env=stack.environment, check=True)
    deployment = client.read_deployment_by_name("rlhf/tiny")

    def fired() -> FlowRun | None:
        of = DeploymentFilter(id=DeploymentFilterId(any_=[deployment.id]))
        runs = client.read_flow_runs(deployment_filter=of)
        return next((run for run in runs if run.state is not None and not run.state.is_scheduled()), None)

    # Before it runs: that may take longer than a minute, after which the schedule would fire again.
    run = until("the schedule fires and a worker takes its run", fired, 90)
    for schedule in client.read_deployment_schedules(deployment.id):
        client.update_deployment_schedule(deployment.id, schedule.id, active=False)
    run = ended(client, run, "the scheduled run ends")
    assert run.state is not None and run.state.is_completed(), log(client, run)
    ppo = child(client, run)
    assert ppo is not None and ppo.work_pool_name == "gpu" and run.work_pool_name == "cpu"
    assert ppo.name.startswith("ppo for ") and "ppo 3/3" in log(client, ppo), "its progress can be followed"
    assert digests(stack.home) == undisturbed.result()
    computed = load_status(stack.home).stage("ppo").computed
    assert computed == {"ppo": pytest.approx(ppo.total_run_time.total_seconds())}, "what its worker computed is paid"
    _logged_as_json(stack, ppo)
    tasks_of(client, run, *STAGES)
    found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    gates = {each.key: str(each.data) for each in found}
    assert f"127.0.0.1:{stack.ports['5000']}/#/experiments" in gates["ppo-gates"] and "policy.kl" in gates["ppo-gates"]
    status = load_status(stack.home)
    assert run.name.startswith("tiny ") and run.name.split()[1] == status.run
    page = f"{stack.api.removesuffix('/api')}/runs"
    assert (status.prefect, status.stage("ppo").prefect) == (f"{page}/flow-run/{run.id}", f"{page}/flow-run/{ppo.id}")
    parent = mlflow_tags(stack, status.stages[0].mlflow_run)["mlflow.parentRunId"]
    assert f"/runs/{parent}/artifacts/report.html" in gates["report"], "it opens in a browser"
    for stage in status.stages:
        at_mlflow = f"127.0.0.1:{stack.ports['5000']}/#/experiments/1/runs/{stage.mlflow_run}"
        assert at_mlflow in gates[f"{stage.name.replace('_', '-')}-gates"] and at_mlflow in gates["report"]
        assert stage.prefect.startswith(page) and stage.prefect in gates["report"]
        tags = mlflow_tags(stack, stage.mlflow_run)
        assert tags["tether.prefect"] == stage.prefect and f"]({stage.prefect})" in tags["mlflow.note.content"]


def _logged_as_json(stack: Stack, ppo: FlowRun) -> None:
    """The workers' log has an object a line, and those of PPO name run, stage, flow run and worker."""
    lines = stack.said(2).splitlines()
    plain = [line for line in lines if line and not line.startswith("{")]
    assert [line for line in plain if not line.startswith("Worker 'ProcessWorker")] == [], "Prefect's greeting alone"
    objects = [json.loads(line) for line in lines if line.startswith("{")]
    of_ppo = [each for each in objects if each["flow_run"] == str(ppo.id) and each["stage"] is not None]
    assert {(each["run"], each["stage"]) for each in of_ppo} == {(load_status(stack.home).run, "ppo")}
    assert all(each["worker"] for each in of_ppo) and any("ppo 3/3" in each["message"] for each in of_ppo)


def mlflow_tags(stack: Stack, run: str | None) -> dict[str, str]:
    """Of a run, as its MLflow server has them."""
    url = f"http://127.0.0.1:{stack.ports['5000']}/api/2.0/mlflow/runs/get?run_id={run}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return {tag["key"]: tag["value"] for tag in json.load(answer)["run"]["data"]["tags"]}


@pytest.fixture(scope="module")
def second(stack: Stack, client: SyncPrefectClient) -> tuple[FlowRun, RunStatus]:
    """A run after the scheduled one, with the same config: the flow run, and what its home says of it."""
    run = ended(client, trigger(client), "a second run ends")
    return run, load_status(stack.home)


def test_a_second_trigger_is_all_hits_and_asks_no_worker(
    client: SyncPrefectClient, second: tuple[FlowRun, RunStatus]
) -> None:
    run, status = second
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert {stage.state for stage in status.stages} == {"cached"}
    tasks = tasks_of(client, run, *STAGES)
    assert set(tasks.values()) == {"Cached", "Completed"}, "human_eval.sample is no stage of its own"
    assert child(client, run) is None


def test_a_run_from_a_stage_on_takes_its_inputs_from_the_run_before(
    stack: Stack, client: SyncPrefectClient, second: tuple[FlowRun, RunStatus]
) -> None:
    _, before = second
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    run = create(client, {**config, "runners": {}}, from_stage="ppo")
    run = ended(client, run, "a run from ppo on ends")
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert f"ppo again from run {before.run}" in log(client, run)
    again = load_status(stack.home)
    assert [s.state for s in again.stages][:4] == ["cached"] * 3 + ["passed"]
    assert [s.digest for s in again.stages] == [s.digest for s in before.stages]


@pytest.mark.long
def test_an_evaluation_on_a_worker_has_the_bytes_of_one_in_the_pipelines_process(
    stack: Stack, client: SyncPrefectClient, second: tuple[FlowRun, RunStatus], tmp_path: Path
) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    asked = {"tasks": [str(write_task(tmp_path, count=12))], "probes": [str(probe(tmp_path))], "margin": 1}
    config |= {"evaluation": config["evaluation"] | asked}
    results = []
    for runners, more in (({"evaluation": config["runners"]["ppo"]}, {}), ({}, {"from_stage": "evaluation"})):
        run = ended(client, create(client, config | {"runners": runners}, **more), "a run with an evaluation ends")
        assert run.state is not None and run.state.is_completed(), log(client, run)
        results.append(load_status(stack.home).stage("evaluation"))
        assert (child(client, run) is not None) == bool(runners), "the pool gpu computes it, or the pipeline"
    there, here = results
    assert there.computed.keys() == here.computed.keys() == {*here.parts, "evaluation"}, "computed twice"
    assert there.digest == here.digest
    assert {name: part.digest for name, part in there.parts.items()} == {
        name: part.digest for name, part in here.parts.items()
    }


def test_a_failed_gate_is_called_so_on_task_and_pipeline(stack: Stack, client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    config["gates"]["policy"]["kl"] = 0
    run = create(client, config)
    run = ended(client, run, "a run with a gate that can't hold ends")
    assert run.state_name == "GateFailed"
    tasks = tasks_of(client, run, *STAGES[:4])
    assert tasks["ppo"] == "GateFailed" and "human_eval" not in tasks


def test_a_bad_value_is_refused_when_the_run_is_created(client: SyncPrefectClient) -> None:
    for changes in ({"clip_range": -1}, {"clip_rnge": 0.2}):
        with pytest.raises(PrefectHTTPStatusError, match="clip_r"):
            trigger(client, **changes)


def test_a_worker_that_differs_refuses_and_says_how(stack: Stack, client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    config["runners"]["ppo"]["runtime"] = {**config["runtime"], "instruction_set": "abacus"}
    run = create(client, config)
    run = ended(client, run, "a run resolved for another machine ends")
    assert run.state_name == "MachineMismatch"
    assert run.state is not None and "wanted abacus, here " in (run.state.message or "")


def test_the_page_asks_the_server_that_it_is_served_from(stack: Stack) -> None:
    """Prefect's page asks port 4200 wherever it is, unless it is told."""
    with urllib.request.urlopen(f"{stack.api.removesuffix('/api')}/ui-settings") as answer:
        assert json.load(answer)["api_url"] == stack.api


def test_the_page_triggers_a_run(stack: Stack, client: SyncPrefectClient) -> None:
    stack.blocks[3] = f"export TETHER_HOME={stack.home} PREFECT_API_URL={stack.api}\n{stack.blocks[3]}"
    shell = stack.terminal(3)
    assert shell.wait(PATIENCE * 180) == 0, stack.said(3)
    assert "human_eval" in stack.said(3)


def test_the_deployed_config_is_the_profiles_with_ppo_on_the_gpu_pool(client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    expected = to_values(load_config("tiny"))
    assert config.pop("runners") == {"ppo": {"pool": "gpu", "runtime": None, "timeout": None}}
    assert {**expected, "runners": None} == {**config, "runners": None}
    assert client.read_work_pool("gpu").concurrency_limit is None, "each worker has its own"
