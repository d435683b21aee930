"""Links from MLflow's pages to the report and to Prefect's pages."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from components.gates.judging import Verdict
from components.gates.table import GATES
from tasks.runs.journal import read_done
from tasks.runs.status import RunStatus, load_status
from tasks.tracking.mlflow_notes import picture, run_note, stage_note
from tests.stored_run import stored_run


def gate_failed(verdicts: list[Verdict]) -> RunStatus:
    stages = [SimpleNamespace(gates=verdicts)]
    return cast("RunStatus", SimpleNamespace(run="a-run", state="gate_failed", stages=stages))


def test_a_runs_note_has_its_state_links_and_picture_and_then_its_report() -> None:
    links = {"Report": "#/report", "Review page": "", "Data Docs": "#/docs"}
    note = run_note(gate_failed([]), links, "f00d", "text")
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
        return run_note(load_status(home, run), {}, "f00d", "")

    note = note_of(tmp_path / "stopped")
    row = note.index("| policy.kl | FAIL | policy/kl_high | 2.789 | <= 2.5 |")
    assert row < note.index(GATES["policy.kl"].remedy) < note.index("**Lineage**") and GATES["policy.kl"].cause in note
    assert GATES["policy.kl"].remedy not in note_of(tmp_path / "waived", waive={"policy.kl": "known"})


def test_a_note_that_mlflow_would_cut_ends_after_its_failed_gates_and_says_where_the_rest_is() -> None:
    """MLflow cuts a tag in the middle of a line, and warns on the terminal of a text that the user did not write."""
    from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

    verdicts = [
        Verdict(name=gate.name, metric=gate.metric, value=9.0, op="<=", threshold=1.0, passed=place % 3 == 0,
                warn_only=place % 3 == 1, description=gate.description)
        for place, gate in enumerate(GATES.values())
    ]  # fmt: skip
    report = "".join(f"| metric {number} | 0.5 |\n" for number in range(1000))
    rest = re.compile(r"\n\n([\d,]+) more lines: `tether status a-run`, or the report\.")
    for some in (verdicts, verdicts[:9], []):
        note = run_note(gate_failed(some), {}, "f00d", report)
        said = rest.search(note)
        assert said and said.end() == len(note) and 7700 < len(note) <= MAX_TAG_VAL_LENGTH
        kept = note[: said.start()]
        assert kept.startswith("**Gate failed.**") and kept.endswith((" |", ".")), "the last line is whole"
        left_out = int(said[1].replace(",", ""))
        assert len(some) > 9 or len(re.findall(r"^\| metric \d", kept, re.M)) + left_out == 1000
    outcomes = re.findall(r"\| (FAIL|WARN) \|", run_note(gate_failed(verdicts), {}, "f00d", report))
    assert outcomes == sorted(outcomes) and outcomes.count("FAIL") == sum(verdict.stops for verdict in verdicts)


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
