"""What a flow run's page on a real Prefect server shows: the run's own lines, and which stage waits for which."""

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prefect")
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
    LogFilter,
    LogFilterFlowRunId,
)
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    PREFECT_LOGGING_TO_API_ENABLED,
    temporary_settings,
)

from tasks.prefect_flow.stage_tasks import (
    Outcome,
    flow_run_log,
    prefect_runner,
    show_in,
    show_report,
    stage_page,
)
from tasks.result import StageResult
from tasks.runs.journal import Sent, read_done
from tasks.runs.status import load_status
from tasks.stages import STAGES
from tests.stored_run import stored_run
from tests.waiting import until

pytestmark = pytest.mark.servers


@pytest.fixture
def server(prefect: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server's API, which the tests' flows use."""
    url = prefect["PREFECT_API_URL"]
    monkeypatch.setenv("PREFECT_API_URL", url)
    with temporary_settings(
        {PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None, PREFECT_LOGGING_TO_API_ENABLED: False}
    ):
        yield url


@pytest.fixture
def run_flow(server: str, start: Any, kit: Any) -> Any:
    """`run_flow(thresholds, shown)`: validate -> sft -> reward -> ppo of toys; the flow run's id and the context."""

    def run(gates: Any = None, shown: bool = False) -> tuple[Any, Any]:
        ctx = start(gates, stages=("validate", "sft", "reward", "ppo"))
        ids: list[Any] = []
        outcome: Outcome[Any] = Outcome()

        def stages() -> Any:
            stage = prefect_runner(ctx)
            data = stage(kit.toy("validate"), kit.ToyJob(steps=0), {})
            sft = stage(kit.toy("sft"), kit.ToyJob(metrics={"sft/loss": "3"}), {"data": data})
            reward = stage(kit.toy("reward"), kit.ToyJob(), {"data": data, "sft": sft})
            return stage(kit.toy("ppo"), kit.ToyJob(), {"data": data, "sft": sft, "reward": reward})

        @flow(name="toys", persist_result=False)
        def toys() -> Any:
            ids.append(runtime.flow_run.id)
            ctx.reporting = replace(ctx.reporting, log=flow_run_log(runtime.flow_run.id))
            if shown:
                show_in(ctx, runtime.flow_run.id)
            return outcome.capture(stages, lambda result: "Completed")

        with ctx:
            toys(return_state=True)
        of_flow_run = FlowRunFilter(id=FlowRunFilterId(any_=ids))

        def told() -> bool:  # Prefect's server writes task runs down behind the flow run's end
            with get_client(sync_client=True) as client:
                tasks = client.read_task_runs(flow_run_filter=of_flow_run)
            return {task.name for task in tasks if task.state and task.state.is_final()} >= set(ctx.status.begun)

        until("the server has all task runs", told, 60)
        return ids[0], ctx

    return run


def test_the_graph_has_an_edge_from_each_stage_to_those_that_read_its_result(run_flow: Any, server: str) -> None:
    flow_run, _ = run_flow()
    with urllib.request.urlopen(f"{server}/flow_runs/{flow_run}/graph-v2", timeout=60) as answer:
        nodes = {node["id"]: node for _, node in json.load(answer)["nodes"]}
    edges = {node["label"]: {nodes[parent["id"]]["label"] for parent in node["parents"]} for node in nodes.values()}
    assert edges == {
        "validate": set(),
        "sft": {"validate"},
        "reward": {"validate", "sft"},
        "ppo": {"validate", "sft", "reward"},
    }


def test_the_page_has_every_line_that_the_run_says_in_order_and_by_stage(run_flow: Any, kit: Any, said: Any) -> None:
    flow_run, ctx = run_flow(kit.thresholds(sft={"loss": 1.0}))
    flow_run_filter = LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        logs = [log for log in client.read_logs(flow_run_filter) if log.name == "tether"]
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])))
    names = {task.id: task.name for task in tasks}
    printed = [line for line in said(ctx).splitlines() if not line.startswith("  sft ")]  # what is progress
    assert [log.message for log in logs] == printed
    assert {names[log.task_run_id] for log in logs} == {"validate", "sft"}
    failed = next(log for log in logs if "FAIL sft.loss" in log.message)
    assert names[failed.task_run_id] == "sft" and "reward" not in names.values()


def test_a_flow_whose_server_is_gone_says_its_lines_on_the_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, start: Any, said: Any
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    ctx = start(log=flow_run_log("0" * 32))
    ctx.say("a line")
    assert said(ctx) == "a line\n"


def test_each_stage_has_its_page_and_the_report_is_an_artifact_that_opens_in_a_browser(
    server: str, run_flow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a path on a worker's disk."""
    flow_run, ctx = run_flow(shown=True)
    root = server.removesuffix("/api")
    status = load_status(ctx.home, ctx.run)
    assert status.prefect == f"{root}/runs/flow-run/{flow_run}"
    for stage in status.stages:
        kind, id_ = stage.prefect.removeprefix(f"{root}/runs/").split("/")
        with urllib.request.urlopen(f"{server}/task_runs/{id_}", timeout=60) as answer:
            assert (kind, json.load(answer)["name"]) == ("task-run", stage.name)
    (ctx.folder / "report.md").write_text("what came of it")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:geheim@mlflow")
    Sent(project="x", code={}, experiment="7", parent="abc").save(ctx.folder)
    show_report(ctx)
    of_flow_run = ArtifactFilter(
        flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]), key=ArtifactFilterKey(any_=["report"])
    )
    with get_client(sync_client=True) as client:
        (found,) = client.read_artifacts(artifact_filter=of_flow_run)
    assert "what came of it" in str(found.data)
    assert "http://mlflow/#/experiments/7/runs/abc/artifacts/report.html?" in str(found.data)
    assert "http://mlflow/get-artifact?path=report.html&run_uuid=abc" in str(found.data)
    assert "[the run in MLflow](http://mlflow/#/experiments/7/runs/abc?" in str(found.data)
    assert "](data:image/svg+xml;base64," in str(found.data), "the lineage as a picture"


def test_a_run_on_an_embedded_server_links_to_no_page_of_it(run_flow: Any) -> None:
    """It ends with the run."""
    _, ctx = run_flow()
    status = load_status(ctx.home, ctx.run)
    assert [status.prefect, *(stage.prefect for stage in status.stages)] == [""] * 5


def test_a_stages_page_says_what_came_of_it_then_its_numbers_then_the_gates_that_did_not_pass(tmp_path: Path) -> None:
    run = stored_run(tmp_path, changes=["gates.policy.kl=2.5"], waive={"policy.kl": "known"})
    ppo = next(each for each in read_done(tmp_path / "runs" / run) if each.group == "ppo")
    result = StageResult(
        stage=STAGES["ppo"], digest=ppo.record.digest, path=ppo.path, state="waived", cached=False,
        verdicts=ppo.verdicts, seconds=1.0, record=ppo.record,
    )  # fmt: skip
    page = stage_page(result, "http://mlflow/stage", "http://mlflow/run")
    assert page.startswith("**Waived.** waived: kl. Artifact `")
    assert "MLflow run: [its page](http://mlflow/stage) · [the whole run](http://mlflow/run)\n" in page
    assert page.index("| policy/kl | 2.345 |") < page.index("### Gates") < page.index("WAIVED") < page.index("PASS")
