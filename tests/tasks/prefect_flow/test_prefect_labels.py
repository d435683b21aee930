"""The page of a flow run that waits for people's labels, and the run that scores them, on a real Prefect server."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

pytest.importorskip("prefect")
from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

from tasks.prefect_flow.prefect_labels import SCORING, awaiting, flow_run_of, order_scoring, show_progress
from tasks.prefect_flow.stage_tasks import Outcome
from tasks.runs.awaited_labels import LabelProgress


@pytest.fixture
def server(prefect: dict[str, str]) -> Iterator[SyncPrefectClient]:
    url = prefect["PREFECT_API_URL"]
    settings = temporary_settings({PREFECT_API_URL: url, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None})
    with settings, get_client(sync_client=True) as client:
        yield client


@pytest.mark.servers
def test_the_page_of_a_waiting_run_names_the_review_page_and_counts_labels_in_one_place(
    server: SyncPrefectClient, tmp_path: Path
) -> None:
    ids: list[Any] = []
    outcome: Outcome[str] = Outcome()

    @flow(name="waits", persist_result=False)
    def waits() -> Any:
        ids.append(runtime.flow_run.id)
        return outcome.capture(lambda: "", lambda _: "AwaitingLabels", lambda _: awaiting(tmp_path))

    waits(return_state=True)
    state = server.read_flow_run(UUID(str(ids[0]))).state
    assert state is not None and (state.name, state.message) == ("AwaitingLabels", awaiting(tmp_path))
    page = f"http://127.0.0.1:4200/runs/flow-run/{ids[0]}"
    for answered, address in ((0, ""), (7, "http://127.0.0.1:8800")):
        raters = {"ada | b": (answered, 12)}
        show_progress(page, "r1", LabelProgress(answered, 24, address, raters))
    mine = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[UUID(str(ids[0]))]))
    found = {each.key: each for each in server.read_artifacts(artifact_filter=mine)}
    assert set(found) == {"labels", "labels-answered"} and len(server.read_artifacts(artifact_filter=mine)) == 2
    assert found["labels-answered"].type == "progress" and found["labels-answered"].data == pytest.approx(100 * 7 / 24)
    text = str(found["labels"].data)
    assert "**7 of 24 labels (29 %)**" in text and "[Review page](http://127.0.0.1:8800)" in text
    assert "| ada \\| b | 7 | 12 |" in text and "tether people status" not in text


@pytest.mark.servers
def test_complete_labels_are_scored_by_a_worker_once_for_the_same_files(
    server: SyncPrefectClient, tmp_path: Path
) -> None:
    (tmp_path / "rater_1.csv").write_text("item\n")
    with contextlib.suppress(ObjectNotFound):  # of an earlier file's tests on the same server
        server.delete_deployment(server.read_deployment_by_name(SCORING).id)
    assert order_scoring("r1", tmp_path) is None, "nobody deployed what scores"
    made = server.create_deployment(server.create_flow_from_name("human-eval"), "score", enforce_parameter_schema=False)
    try:
        first = order_scoring("r1", tmp_path)
        again = order_scoring("r1", tmp_path)
        (tmp_path / "rater_1.csv").write_text("item,and a label more\n")
        other = order_scoring("r1", tmp_path)
        assert first is not None and other is not None and first == again != other
        ordered = server.read_flow_run(flow_run_of(first))
        assert ordered.deployment_id == made
        assert ordered.parameters == {
            "sheet": str(tmp_path), "run": "r1", "scored_by": "when the labels were complete",
        }  # fmt: skip
    finally:
        server.delete_deployment(made)


def test_an_address_that_names_no_flow_run_is_not_taken_for_one() -> None:
    one = uuid4()
    assert flow_run_of(f"http://127.0.0.1:4200/runs/flow-run/{one}?tab=x") == one
    with pytest.raises(ValueError, match="badly formed"):
        flow_run_of("http://127.0.0.1:4200/runs")
