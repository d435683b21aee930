"""docs/operations/local.md with real processes on loopback: servers, workers, a schedule, and what may die.

`pytest -m servers -s` (`.ci/run` runs it too) prints the times.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    DeploymentFilter,
    DeploymentFilterId,
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelling

from components.store.store import ArtifactStore
from flows.config.run_config import load_config, to_values
from flows.deployment.servers import free_port
from tasks.runs.points import read_points
from tasks.runs.status import list_runs, load_status

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DOC = (ROOT / "docs" / "operations" / "local.md").read_text()
UPDATES = 60
"""PPO's, where it has to last until another pipeline is up."""
LONGER = 2 * UPDATES + 1
"""The same, where a pipeline is killed first, and that has to be noticed."""
FEW = 20
"""The same, where it has to last long enough to be killed."""

pytestmark = [pytest.mark.servers, pytest.mark.timeout(900)]

T = TypeVar("T")


def wait_for(what: str, look: Callable[[], T], seconds: float = 120) -> T:
    """What `look` finds, as soon as it finds something; prints how long that took."""
    began = time.monotonic()
    while True:
        found = look()
        if found:
            print(f"{time.monotonic() - began:6.1f} s  {what}")
            return found
        assert time.monotonic() - began < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.3)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


class Stack:
    """Servers and workers as the page says, each in a terminal of its own."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.ports = {"4200": str(free_port(0)), "5000": str(free_port(0))}
        self.logs = folder
        self.blocks = [self._here(block) for block in re.findall(r"```sh\n(.*?)```", DOC, re.S)]
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_", "TETHER_"))},
            "PREFECT_SERVER_API_PORT": self.ports["4200"],
            "MLFLOW_PORT": self.ports["5000"],
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            "CUDA_VISIBLE_DEVICES": "7",
            "TETHER_LOG_FORMAT": "json",
        }
        self.api = f"http://127.0.0.1:{self.ports['4200']}/api"

    def _here(self, block: str) -> str:
        for usual, port in self.ports.items():
            block = block.replace(usual, port)
        return block.replace("$PWD/.tether", str(self.home)).replace(".venv/bin/", f"{BIN}/")

    def terminal(self, number: int, *, go_on: bool = False) -> subprocess.Popen[bytes]:
        """Run a block of the page in a shell; with `go_on`, its last command stays in the foreground."""
        *before, last = self.blocks[number].strip().split("\n")
        script = "\n".join(["set -e", *before, f"exec {last}" if go_on else last])
        with (self.logs / f"terminal-{number}.log").open("wb") as log:
            return subprocess.Popen(["bash", "-c", script], cwd=ROOT, env=self.environment, stdout=log, stderr=log)

    def said(self, number: int) -> str:
        return (self.logs / f"terminal-{number}.log").read_text()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("operations"))
    pages = stack.terminal(0, go_on=True)
    try:
        wait_for("both servers are up", lambda: "Ctrl-C" in stack.said(0))
        deployed = stack.terminal(1)
        assert deployed.wait(120) == 0, stack.said(1)
        workers = stack.terminal(2, go_on=True)
        try:
            wait_for("workers are started", lambda: "Ctrl-C" in stack.said(2))
            yield stack
        finally:
            end(workers)
    finally:
        end(pages)


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[SyncPrefectClient]:
    with temporary_settings({PREFECT_API_URL: stack.api}), get_client(sync_client=True) as client:
        yield client


def trigger(client: SyncPrefectClient, **changes: Any) -> FlowRun:
    """A run of the pipeline with `ppo` keys changed."""
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    return create(client, {**config, "ppo": {**config["ppo"], **changes}})


def create(client: SyncPrefectClient, config: dict[str, Any], **parameters: Any) -> FlowRun:
    """A run of the pipeline with this config, which is not tried again by itself."""
    deployment = client.read_deployment_by_name("rlhf/tiny")
    parameters |= {"profile": "tiny", "config": {**config, "retries": 0}}
    return client.create_flow_run_from_deployment(deployment.id, parameters=parameters)


def ended(client: SyncPrefectClient, run: FlowRun, what: str, seconds: float = 180) -> FlowRun:
    def look() -> FlowRun | None:
        found = client.read_flow_run(run.id)
        return found if found.state is not None and found.state.is_final() else None

    return wait_for(what, look, seconds)


def log(client: SyncPrefectClient, run: FlowRun) -> str:
    lines = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[run.id])), limit=200)
    return "\n".join(line.message for line in lines)


def child(client: SyncPrefectClient, parent: FlowRun) -> FlowRun | None:
    """The run that computes PPO for a pipeline."""
    filter_ = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent.id]))
    return next(iter(client.read_flow_runs(flow_run_filter=filter_)), None)


def working_child(client: SyncPrefectClient, stack: Stack, parent: FlowRun, steps: int = 3) -> FlowRun:
    """The same, once it has a few updates behind it."""
    found = wait_for("PPO is ordered", lambda: child(client, parent))
    key = found.parameters["order"]["key"]
    wait_for(
        f"PPO is {steps} updates on", lambda: len(read_points(stack.home / "work" / key / "points.jsonl")) >= steps
    )
    return client.read_flow_run(found.id)


def pid(run: FlowRun) -> int:
    """Of a flow run's process."""
    assert run.infrastructure_pid is not None
    return int(str(run.infrastructure_pid).rpartition(":")[2])


def kill(run: FlowRun) -> None:
    """SIGKILL a flow run's process."""
    os.kill(pid(run), signal.SIGKILL)


def environment(run: FlowRun) -> list[str]:
    """Of a flow run's process."""
    return Path(f"/proc/{pid(run)}/environ").read_text().split("\0")


def digests(home: Path) -> list[str]:
    return [stage.digest for stage in load_status(home).stages]


Local = Callable[..., "Future[list[str]]"]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """`local(**changes)` has the pipeline run without a server, with `ppo` keys changed: its digests, once it ended."""
    home = tmp_path_factory.mktemp("local") / "home"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}

    def run(settings: list[str]) -> list[str]:
        command = [BIN / "tether", "run", "tiny", *settings]
        done = subprocess.run(command, env=environment | {"TETHER_HOME": str(home)}, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return digests(home)

    with ThreadPoolExecutor(1) as pool:
        yield lambda **changes: pool.submit(run, [f"--set=ppo.{name}={value}" for name, value in changes.items()])


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
        return next((run for run in runs if run.state is not None and run.state.is_running()), None)

    run = wait_for("the schedule fires and its run begins", fired, 90)
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
    lines = (stack.home / "worker-gpu-7.log").read_text().splitlines()
    logged = [json.loads(line) for line in lines if line.startswith("{")]
    plain = [line for line in lines if line and not line.startswith("{")]
    assert [line for line in plain if not line.startswith("Worker 'ProcessWorker")] == [], "Prefect's greeting alone"
    of_ppo = [each for each in logged if each["stage"] == "ppo"]
    assert {(each["run"], each["flow_run"]) for each in of_ppo} == {(load_status(stack.home).run, str(ppo.id))}
    assert all(each["worker"] for each in of_ppo) and any("ppo 3/3" in each["message"] for each in of_ppo)
    names = {task.name: task.state_name for task in client.read_task_runs(flow_run_filter=_only(run))}
    assert {"validate", "sft", "reward", "ppo", "human_eval"} <= set(names)
    found = client.read_artifacts(artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run.id])))
    gates = {each.key: str(each.data) for each in found}
    assert f"127.0.0.1:{stack.ports['5000']}/#/experiments" in gates["ppo-gates"] and "ppo.kl" in gates["ppo-gates"]
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


def mlflow_tags(stack: Stack, run: str | None) -> dict[str, str]:
    """Of a run, as its MLflow server has them."""
    url = f"http://127.0.0.1:{stack.ports['5000']}/api/2.0/mlflow/runs/get?run_id={run}"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return {tag["key"]: tag["value"] for tag in json.load(answer)["run"]["data"]["tags"]}


def _only(run: FlowRun) -> FlowRunFilter:
    return FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))


def test_a_second_trigger_is_all_hits_and_asks_no_worker(stack: Stack, client: SyncPrefectClient) -> None:
    run = ended(client, trigger(client), "a second run ends")
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert {stage.state for stage in load_status(stack.home).stages} == {"cached"}
    tasks = client.read_task_runs(flow_run_filter=_only(run))
    assert {task.state_name for task in tasks} == {"Cached", "Completed"}, "human_eval.sample is no stage of its own"
    assert child(client, run) is None


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


def test_cancelling_a_pipeline_cancels_its_worker(stack: Stack, client: SyncPrefectClient) -> None:
    run = trigger(client, updates=50 * UPDATES)
    ppo = working_child(client, stack, run)
    assert "CUDA_VISIBLE_DEVICES=7" in environment(ppo), "the worker says what GPU, not the deployment"
    client.set_flow_run_state(run.id, Cancelling())
    assert ended(client, run, "the pipeline is cancelled", 60).state_name == "Cancelled"
    assert ended(client, ppo, "its worker's run is cancelled", 90).state_name == "Cancelled"
    assert load_status(stack.home).state == "interrupted"


def test_a_failed_gate_is_called_so_on_task_and_pipeline(stack: Stack, client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    config["gates"]["ppo"]["kl"] = 0
    run = create(client, config)
    run = ended(client, run, "a run with a gate that can't hold ends")
    assert run.state_name == "GateFailed"
    tasks = {task.name.split("-")[0]: task.state_name for task in client.read_task_runs(flow_run_filter=_only(run))}
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


def test_a_run_from_a_stage_on_takes_its_inputs_from_the_run_before(stack: Stack, client: SyncPrefectClient) -> None:
    ended(client, trigger(client), "a run of hits ends")
    before = load_status(stack.home)
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    run = create(client, {**config, "runners": {}}, from_stage="ppo")
    run = ended(client, run, "a run from ppo on ends")
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert f"ppo again from run {before.run}" in log(client, run)
    again = load_status(stack.home)
    assert [s.state for s in again.stages][:4] == ["cached"] * 3 + ["passed"]
    assert [s.digest for s in again.stages] == [s.digest for s in before.stages]


def test_a_retried_run_takes_up_the_run_it_began_and_computes_nothing_twice(
    stack: Stack, client: SyncPrefectClient
) -> None:
    ended(client, trigger(client), "a run of hits ends")
    whole = load_status(stack.home)
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

    run = wait_for("the retried run ends", retried, 300)
    assert run.state is not None and run.state.is_completed(), log(client, run)
    assert list_runs(stack.home) == runs, "no second run is left beside the first"
    after = load_status(stack.home)
    assert after.run == begun.run
    assert [s.state for s in after.stages] == ["cached", "cached", "cached", "passed", "passed"]
    assert [s.digest for s in after.stages][:3] == [s.digest for s in whole.stages][:3]
    keys = {s.key for s in after.stages[:3]}
    assert {key: number for key, number in attempts(stack.home).items() if key in keys} == {
        key: number for key, number in computed.items() if key in keys
    }
    steps = [point["step"] for point in read_points(stack.home / "runs" / after.run / "metrics" / "ppo.jsonl")]
    assert len(set(steps)) == len(steps) > FEW
    names = [task.state_name for task in client.read_task_runs(flow_run_filter=_only(run)) if "ppo" in task.name]
    assert "Completed" in names, "the page shows how it ended"


def attempts(home: Path) -> dict[str, int]:
    """How often each key was computed."""
    store = ArtifactStore(home)
    return {entry.name: len(store.attempts(entry.name)) for entry in (home / "store" / "records").iterdir()}


def test_the_page_asks_the_server_that_it_is_served_from(stack: Stack) -> None:
    """Prefect's page asks port 4200 wherever it is, unless it is told."""
    with urllib.request.urlopen(f"{stack.api.removesuffix('/api')}/ui-settings") as answer:
        assert json.load(answer)["api_url"] == stack.api


def test_the_page_triggers_a_run(stack: Stack, client: SyncPrefectClient) -> None:
    stack.blocks[3] = f"export TETHER_HOME={stack.home} PREFECT_API_URL={stack.api}\n{stack.blocks[3]}"
    shell = stack.terminal(3)
    assert shell.wait(180) == 0, stack.said(3)
    assert "human_eval" in stack.said(3)


def test_the_deployed_config_is_the_profiles_with_ppo_on_the_gpu_pool(client: SyncPrefectClient) -> None:
    config = client.read_deployment_by_name("rlhf/tiny").parameters["config"]
    expected = to_values(load_config("tiny"))
    assert config.pop("runners") == {"ppo": {"pool": "gpu", "runtime": None, "timeout": None}}
    assert {**expected, "runners": None} == {**config, "runners": None}
    assert client.read_work_pool("gpu").concurrency_limit is None, "each worker has its own"


def test_a_dead_workers_run_is_noticed_by_its_silence(
    client: SyncPrefectClient, silent: tuple[FlowRun, FlowRun]
) -> None:
    """The last test: the silence lasts while the others run."""
    run, ppo = silent
    ppo = ended(client, ppo, "the rest of a dead worker's silence", 120)
    assert ppo.state is not None and ppo.state.name == "Crashed" and "its worker died" in (ppo.state.message or "")
    run = ended(client, run, "its pipeline ends")
    assert run.state is not None and run.state.is_failed() and "checkpoint" in (run.state.message or "")
