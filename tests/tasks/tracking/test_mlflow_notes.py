"""Links from MLflow's pages to the report and to Prefect's pages."""

from pathlib import Path
from typing import Any

from components.gates.table import GATES
from tasks.runs.journal import read_done
from tasks.tracking.mlflow_notes import picture, run_note, stage_note
from tests.stored_run import stored_run


def test_a_runs_note_has_its_state_links_and_picture_and_then_its_report() -> None:
    note = run_note("gate_failed", [], {"Report": "#/report", "Review page": "", "Data Docs": "#/docs"}, "f00d", "text")
    assert note.split("\n\n") == [
        "**Gate failed.**",
        "[Report](#/report) · [Data Docs](#/docs)",
        "**Lineage**",
        picture("f00d"),
        "text",
    ]


def test_a_note_on_a_run_that_a_gate_stopped_says_what_to_do_and_of_a_waived_gate_nothing(tmp_path: Path) -> None:
    def note_of(home: Path, **options: Any) -> str:
        run = stored_run(home, changes=["gates.policy.kl=2.5"], **options)
        verdicts = [verdict for done in read_done(home / "runs" / run) for verdict in done.verdicts]
        return run_note("gate_failed", verdicts, {}, "f00d", "")

    note = note_of(tmp_path / "stopped")
    row = note.index("| policy.kl | FAIL | policy/kl_high | 2.789 | <= 2.5 |")
    assert row < note.index(GATES["policy.kl"].remedy) < note.index("**Lineage**") and GATES["policy.kl"].cause in note
    assert GATES["policy.kl"].remedy not in note_of(tmp_path / "waived", waive={"policy.kl": "known"})


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
