"""A run's end: every gate with value, rule and verdict, and simulated things called simulated."""

import io
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from components.base.jsonl import write_json, write_rows
from components.base.process import this_process
from components.gates.judging import Verdict
from components.store.store import ArtifactStore
from flows.launch.reports import what_ppo_watched
from flows.reports.terminal import markdown, price, print_run, print_steps, simulated_note
from flows.reports.verdict import RunVerdict, Step
from tasks.execution.explanation import lines
from tasks.runs.status import RunStatus, StageStatus

GATE = Verdict(name="policy.kl", metric="policy/kl_high", value=9.5, op="<=", threshold=8.0, passed=False)
PPO = StageStatus(
    name="ppo", state="gate_failed", seconds=60.0, key="k", digest="d" * 64,
    metrics={"policy/kl": 9.1, "policy/gold": 0.25, "ppo/odd": None}, gates=[GATE],
)  # fmt: skip
STATUS = RunStatus(
    run="r1", profile="demo", state="gate_failed", started="2026-01-01T00:00:00+00:00", seconds=61.2, origin={},
    stages=[PPO, StageStatus(name="human_eval")], finished=None, process=this_process(),
)  # fmt: skip


def printed(simulated: str, status: RunStatus = STATUS, width: int = 120, watched: Sequence[str] = ()) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    print_run(console, status, simulated, watched)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_terminal_shows_stages_numbers_and_gates() -> None:
    text = printed("")
    row = next(line for line in text.splitlines() if line.startswith("policy.kl"))
    assert row.split() == ["policy.kl", "9.5", "<=", "8", "FAIL"]
    assert "kl 9.1" in text and "gold 0.25" in text
    assert "human_eval" in text and "not_run" in text
    assert "run r1: gate_failed" in text


def test_gates_that_are_off_are_one_line() -> None:
    """With every gate off a screen of 58 rows hid the stages."""
    off = [GATE.model_copy(update={"name": f"ppo.odd{i}", "threshold": None}) for i in range(58)]

    def shown(gates: list[Verdict]) -> str:
        console = Console(file=io.StringIO(), width=300, color_system=None)
        stages = [PPO.model_copy(update={"gates": gates})]
        print_run(console, STATUS.model_copy(update={"stages": stages}))
        return console.file.getvalue()  # type: ignore[attr-defined]

    text = shown([GATE, *off])
    named = ", ".join(gate.name for gate in off[:8])
    assert f"58 gates are off (the report lists them): {named} and 50 more." in text
    assert "FAIL" in text and "OFF" not in text
    assert "value" not in shown(off), "an empty table"
    assert "1 gate is off: ppo.odd0.\n" in shown([GATE, off[0]])


CARRIERS = {
    "update": 60, "kl": 3.25,
    "tokens": [{"token": " re[b]fund", "nats": 0.75, "count": 9, "share": 0.23},
               {"token": "\x1b[31mno", "nats": 0.5, "count": 4, "share": None}],
    "prompts": [{"prompt": [{"role": "user", "content": f"{i} late " + "parcel " * 20}], "response": "no", "nats": 9.5,
                 "share": 0.02} for i in range(5)],
}  # fmt: skip


def test_a_run_says_which_alarms_were_raised_and_what_carries_kl_as_its_artifact_does(tmp_path: Path) -> None:
    store, out = ArtifactStore(tmp_path / "home"), tmp_path / "out"
    out.mkdir()
    write_json(out / "metadata.json", {"alarms": [{"name": "length", "update": 7}, {"name": "nll", "update": 9}]})
    write_rows(out / "kl_carriers.jsonl", [{**CARRIERS, "update": 20}, CARRIERS])
    record = store.publish("7" * 64, out, None, {"stage": "ppo", "run": "r1", "metrics": {}, "parts": {}})
    ppo = PPO.model_copy(update={"key": record.key, "digest": record.digest})
    status = STATUS.model_copy(update={"stages": [ppo]})
    watched = what_ppo_watched(tmp_path / "home", status)
    text = " ".join(printed("", status, watched=watched).split())
    assert "Alarms of ppo: length at update 7, nll at update 9." in text
    assert "KL of update 60, 3.25 nats a response, is carried most by the tokens 're[b]fund' 0.75 (23%)," in text
    assert "\x1b" not in text, "a token cannot colour the terminal"
    prompts = watched[-1]
    assert "'0 late parcel parcel" in prompts and "…' 9.50 (2%)" in prompts and "'3 late" not in prompts
    assert what_ppo_watched(tmp_path / "home", STATUS) == [], "whose record the store has not"


def test_the_alarm_of_falling_chosen_responses_follows_its_gate(tmp_path: Path) -> None:
    """Means of the last 8 batches: 0, -1, ..., -7, then -9, -11: below -8 after update 17, as every other update's
    batch has chosen responses, and never below -20."""
    store, out = ArtifactStore(tmp_path / "home"), tmp_path / "out"
    out.mkdir()
    ratios = [0.0, -2, -4, -6, -8, -10, -12, -14, -16, -18]
    rows = [[{"direct/chosen_log_ratio": ratio}, {"direct/rejected_log_ratio": 1.0}] for ratio in ratios]
    write_rows(out / "history.jsonl", [{"update": i, **row} for i, row in enumerate(chain(*rows), 1)])
    record = store.publish("7" * 64, out, None, {"stage": "ppo", "run": "r1", "metrics": {}, "parts": {}})
    for threshold, alarms in ((-8.0, ["Alarms of ppo: chosen at update 17."]), (-20.0, []), (None, [])):
        gate = GATE.model_copy(update={"name": "policy.chosen_log_ratio", "threshold": threshold})
        ppo = PPO.model_copy(update={"key": record.key, "digest": record.digest, "gates": [gate]})
        assert what_ppo_watched(tmp_path / "home", STATUS.model_copy(update={"stages": [ppo]})) == alarms


def test_no_value_or_outcome_is_cut_where_a_gate_has_a_long_rule_and_the_terminal_80_columns() -> None:
    name = "reward.length_partial_correlation_high"
    gates = [
        GATE.model_copy(update={"name": name, "value": 0.30123}),
        GATE.model_copy(update={"op": "in", "threshold": (0.8, 1.25), "within": (0.9323, 1.081), "value": 2.3842e-06}),
    ]
    text = printed("", STATUS.model_copy(update={"stages": [PPO.model_copy(update={"gates": gates})]}), width=80)
    rows = [line.split() for line in text.splitlines() if line.startswith((name, "policy.kl"))]
    assert [(row[0], row[1], row[-1]) for row in rows] == [(name, "0.3012", "FAIL"), ("policy.kl", "2.384e-06", "FAIL")]


def test_a_run_that_was_to_end_after_a_stage_says_which_did_not_run_everywhere() -> None:
    whole = [StageStatus(name=name, state="passed") for name in ("sft", "reward")]
    later = [StageStatus(name="ppo"), StageStatus(name="human_eval")]
    status = STATUS.model_copy(update={"state": "passed", "origin": {"until": "reward"}, "stages": whole + later})
    said = "The run was asked to end after reward; not run: ppo, human_eval."
    assert said in printed("", status) and said in markdown(status)
    assert "ppo         not run (the run ends after reward)" in lines(status)
    assert "asked to end" not in printed("") + markdown(STATUS) + str(lines(STATUS))


def test_the_page_holds_every_metric_and_gate() -> None:
    text = markdown(STATUS)
    assert "| policy.kl | FAIL | policy/kl_high | 9.5 | <= 8 |" in text
    for name in PPO.metrics:
        assert name in text


def test_costs_and_what_reuse_saved_are_shown_where_there_is_a_price_and_nowhere_else() -> None:
    assert "cost" not in printed(False) + markdown(STATUS, False)
    begun: dict[str, Any] = {"price": 36.0, "started": 1.0}
    hit = StageStatus(name="sft", state="cached", cached=True, reused={"sft": 125.0}, **begun)
    computed = PPO.model_copy(update={"computed": {"ppo": 40.0}, **begun})
    status = STATUS.model_copy(update={"currency": "EUR", "stages": [hit, computed, STATUS.stages[1]]})
    text, page = printed(False, status), markdown(status, False)
    assert "demo, 61 s, 0.40 EUR, saved 1.25 EUR" in text and "61.2 s, 0.40 EUR, saved 1.25 EUR." in page
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "saved 1.25 EUR" in rows["sft"] and "0.40 EUR" in rows["ppo"] and "EUR" not in rows["human_eval"]
    assert "| ppo | gate_failed | 60.0 | 0.40 EUR |" in page and "| sft | cached | 0.0 | saved 1.25 EUR |" in page
    assert price(0.000123, "EUR") == "0.00012 EUR" and price(0, "EUR") == "0.00 EUR" and price(None, "EUR") == ""


def test_who_started_waived_and_scored_is_said_where_people_look() -> None:
    waived = GATE.model_copy(update={"waived": True, "user": "bob", "reason": "a|trial"})
    ppo = PPO.model_copy(update={"gates": [waived], "user": "ada"})
    scored = StageStatus(name="human_eval", state="passed", user="eve")
    status = STATUS.model_copy(update={"user": "ada", "stages": [ppo, scored]})
    text, page = printed(False, status), markdown(status, False)
    assert "Started by ada.\nrun r1: gate_failed\n" in text and "started by ada" in page
    assert "passed by eve" in text and "| human_eval | passed by eve |" in page and "gate_failed by" not in page
    assert "WAIVED by bob" in text and "WAIVED by bob: a\\|trial |" in page


def test_a_run_is_shown_with_its_name_and_tags_as_they_are() -> None:
    called = {"name": "night [b]one", "tags": {"seed": "1", "baseline": ""}, "user": "ada"}
    named = STATUS.model_copy(update=called)
    assert "night [b]one, seed=1 baseline, demo, 61 s" in printed("", named)
    assert r"night \[b\]one, seed=1 baseline, profile demo, 61.2 s, started by ada." in markdown(named)
    assert "\nprofile demo, 61.2 s.\n" in markdown(STATUS)


@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("people", [True, False])
def test_simulated_things_are_called_simulated_and_people_never(generated: bool, people: bool) -> None:
    """Defect 9: with `judges=people` the page still said that judges "are simulated"."""
    judges, data = "people" if people else "simulated", None if generated else "pairs.jsonl"
    note = simulated_note({"data": {"preferences": data}, "human_eval": {"judges": judges}})
    for text in (markdown(STATUS, note), printed(note)):
        assert ("simulated" in text) is generated
        assert ("judges, gold scores" in text) is (generated and not people)
        assert ("People judge" in text) is (generated and people)


def test_a_command_to_try_is_printed_whole_so_that_it_can_be_copied() -> None:
    console = Console(file=io.StringIO(), width=40)
    command = "tether rerun ppo --from 20261124-203924-2b1a --set ppo.kl.target=2 --set ppo.kl.horizon=8"
    print_steps(console, RunVerdict("", [Step("Lower `ppo.kl.target`, [bold] or not:", command), Step("Wait.")]))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text == f"Lower ppo.kl.target, [bold] or not:\n    {command}\nWait.\n"
