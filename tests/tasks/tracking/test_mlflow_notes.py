"""Links from MLflow's pages to the report and to Prefect's pages."""

from pathlib import Path

from components.base.process import this_process
from components.gates.table import GATES
from tasks.runs.journal import read_done
from tasks.runs.status import RunStatus, StageStatus, load_status
from tasks.tracking.mlflow_notes import picture, run_note, stage_note
from tests.stored_run import stored_run


def test_a_runs_note_links_to_its_report_its_flow_run_and_each_stages_pages() -> None:
    stages = [StageStatus(name="sft", prefect="http://p/runs/task-run/t1"), StageStatus(name="ppo")]
    status = RunStatus(
        run="r1", profile="tiny", started="2026-01-01T00:00:00+00:00", state="passed", seconds=1.0, stages=stages,
        prefect="http://p/runs/flow-run/f1", finished=None, process=this_process(),
    )  # fmt: skip
    note = run_note(status, [], {"sft": "#/m/sft", "ppo": "#/m/ppo"}, {}, "f00d")
    assert "[sft](#/m/sft) ([Prefect](http://p/runs/task-run/t1))" in note
    assert "| [ppo](#/m/ppo) |" in note, "it has no page there"


def test_a_runs_note_is_in_order_and_its_numbers_are_for_people(tmp_path: Path) -> None:
    """State and links come first, then what did not pass, the picture, and the stages; 14,000 was 1.4e+04."""
    run = stored_run(tmp_path, changes=["gates.policy.kl=2.5"], waive={"policy.kl": "known"})
    status, done = load_status(tmp_path, run), read_done(tmp_path / "runs" / run)
    next(each for each in done if each.group == "validate").record.metrics["data/pairs"] = 14000.0
    status.seconds, status.started = 292.0, "2026-01-01T00:00:00+00:00"
    note = run_note(status, done, {}, {"Report": "#/report", "Review page": "", "Data Docs": "#/docs"}, "f00d")
    first, links, *_ = note.split("\n\n")
    assert first.startswith("**Waived.** Profile tiny")
    assert first.endswith("begun 2026-01-01 00:00:00 UTC, took 4 min 52 s.")
    assert links == "[Report](#/report) · [Data Docs](#/docs)"
    places = [note.index(each) for each in ("**Gates that did not pass**", "**Lineage**", "**Stages**")]
    assert places == sorted(places)
    assert "](get-artifact?path=lineage.svg&run_uuid=f00d)" in note
    assert "pairs 14,000" in note and "waived: kl" in note and "e+" not in note


def test_a_note_on_a_run_that_a_gate_stopped_says_what_to_do_and_of_a_waived_gate_nothing(tmp_path: Path) -> None:
    run = stored_run(tmp_path / "stopped", changes=["gates.policy.kl=2.5"])
    done = read_done(tmp_path / "stopped" / "runs" / run)
    note = run_note(load_status(tmp_path / "stopped", run), done, {}, {}, "f00d")
    row = note.index("| policy.kl | FAIL | policy/kl_high | 2.789 | <= 2.5 |")
    advice = note.index(GATES["policy.kl"].remedy)
    assert row < advice < note.index("**Stages**") and GATES["policy.kl"].cause in note
    run = stored_run(tmp_path / "waived", changes=["gates.policy.kl=2.5"], waive={"policy.kl": "known"})
    done = read_done(tmp_path / "waived" / "runs" / run)
    assert GATES["policy.kl"].remedy not in run_note(load_status(tmp_path / "waived", run), done, {}, {}, "f00d")


def test_a_stages_note_has_its_pages_numbers_and_lineage_and_shows_first_the_gates_that_did_not_pass(
    tmp_path: Path,
) -> None:
    run = stored_run(tmp_path, changes=["gates.policy.kl=2.5"], waive={"policy.kl": "known"})
    ppo = next(each for each in read_done(tmp_path / "runs" / run) if each.group == "ppo")
    note = stage_note(ppo, "#/run", [], {"The whole run": "#/parent", "This stage in Prefect": ""}, "f00d")
    assert "\n\n[The whole run](#/parent)\n\n" in note and "Prefect" not in note
    assert "| policy/kl | 2.345 |" in note and picture("f00d") in note
    gates = note[note.index("**Gates**") :]
    assert gates.index("WAIVED") < gates.index("PASS")
