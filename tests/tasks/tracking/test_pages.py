"""Links from MLflow's pages to the report and to Prefect's pages."""

from tasks.runs.status import RunStatus, StageStatus
from tasks.tracking.pages import prefect_tag, run_note


def test_a_runs_note_links_to_its_report_its_flow_run_and_each_stages_pages() -> None:
    stages = [StageStatus(name="sft", prefect="http://p/runs/task-run/t1"), StageStatus(name="ppo")]
    status = RunStatus(
        run="r1", profile="tiny", started="2026-01-01T00:00:00+00:00", state="passed", seconds=1.0, stages=stages,
        prefect="http://p/runs/flow-run/f1",
    )  # fmt: skip
    note = run_note(status, [], {"sft": "#/m/sft", "ppo": "#/m/ppo"}, "#/m/report.html")
    assert "[Report with its charts](#/m/report.html) · [Flow run in Prefect](http://p/runs/flow-run/f1)" in note
    assert "[sft](#/m/sft) ([Prefect](http://p/runs/task-run/t1))" in note
    assert "| [ppo](#/m/ppo) |" in note, "it has no page there"
    assert prefect_tag(status.prefect) == {"tether.prefect": status.prefect} and prefect_tag("") == {}
