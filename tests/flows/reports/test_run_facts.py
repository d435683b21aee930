"""What a run's report says is what the run stored: whose results, which numbers, who waived what."""

from contextlib import closing
from pathlib import Path

import pytest

from components.data.support_desk.task import SIMULATED
from components.store.store import ArtifactStore
from flows.reports import run_facts as reports
from flows.reports.page import ending
from flows.reports.run_facts import StageFacts, run_facts
from tasks.runs.points import Spool, points_file
from tasks.runs.status import StageStatus
from tests import stored_run as stored
from tests.stored_run import BINS, CURVES, METRICS, evaluation, forget, stored_run

OTHER = "20260102-000000-bbbb"


def curve(name: str) -> list[tuple[int, float]]:
    return list(enumerate(CURVES[name.partition("/")[0]][name], 1))


def test_a_passed_runs_facts_are_the_stored_ones(tmp_path: Path) -> None:
    run = stored_run(tmp_path, changes=["ppo.updates=7"])
    facts = run_facts(tmp_path)
    assert (facts.status.run, facts.status.state, facts.simulated) == (run, "passed", SIMULATED)
    assert [stage.state for stage in facts.status.stages] == ["passed"] * 5
    assert {stage.name: stage.metrics for stage in facts.stages} == METRICS
    assert facts.stages[3].outcomes == {"PASS": 6} and facts.stages[3].why == {"ppo": "no earlier record"}
    assert facts.stage("sft").curves["sft/train_loss"] == curve("sft/train_loss")
    assert facts.stage("ppo").curves["ppo/kl"] == curve("ppo/kl")
    assert facts.reward["bins"] == BINS
    assert facts.stage("ppo").bound("policy.kl") == 5.0 and facts.policy.tether["control"] == "fixed"
    assert facts.comparison is not None and facts.comparison["win_rate"]["low"] == 0.5987
    assert (facts.data.quarantined, facts.data.checks[0]["row_numbers"]) == (2, [17, 230])
    changed = {each.name: (each.value, each.default) for each in facts.options if each.changed}
    assert changed == {"ppo.updates": (7, 3)}
    assert facts.stage("sft").by is None and facts.stage("ppo").by is None
    assert ending(facts) == []


@pytest.mark.parametrize("method", ["ppo", "direct"])
def test_the_peak_of_memory_is_found_whatever_the_method(tmp_path: Path, method: str) -> None:
    with closing(Spool(points_file(tmp_path / "runs" / "r", "ppo"))) as spool:
        for step, gb in enumerate((0.5, 0.75, 0.625)):
            spool.append(step, {f"{method}/peak_memory_gb": gb, f"{method}/loss": 9.0})
    facts = StageFacts.of(tmp_path, "r", StageStatus(name="ppo"))
    assert facts.speed["memory"] == 0.75


def test_a_removed_option_at_its_last_default_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"data": {"checks": {"rated": {"severity": "warn", "threshold": 0.0}}}, "reward": {"combine": "members"}}
    stored_run(tmp_path)
    monkeypatch.setattr(reports, "run_values", lambda home, run: old)
    changed = {each.name: (each.value, each.default) for each in run_facts(tmp_path).options if each.changed}
    assert changed == {"reward.combine": ("members", "ensemble")}


def test_a_key_that_was_computed_to_other_bytes_since_does_not_change_an_earlier_runs_facts(tmp_path: Path) -> None:
    stored_run(tmp_path)
    store = ArtifactStore(tmp_path)
    key = run_facts(tmp_path).stage("reward").status.key or ""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "calibration.json").write_text('{"bins": []}')
    store.publish(key, tmp_path / "other", None, {"stage": "reward", "run": OTHER})
    facts = run_facts(tmp_path)
    assert facts.reward["bins"] == BINS and facts.stage("reward").by is None


def test_the_worst_kl_and_the_highest_reward_are_picked_out_and_others_come_in_order(tmp_path: Path) -> None:
    stored_run(tmp_path)
    ppo = run_facts(tmp_path).policy
    assert ppo.evaluated == 9
    assert [(each.number, each.picked) for each in ppo.samples[:3]] == [
        (4, ["the worst KL"]), (8, ["the highest reward"]), (1, []),
    ]  # fmt: skip
    assert [each.number for each in ppo.samples[2:]] == [1, 2, 3, 5, 6, 7]


def test_the_worst_prompts_stand_in_the_order_of_their_file(tmp_path: Path) -> None:
    stored_run(tmp_path)
    worst = run_facts(tmp_path).policy.worst
    assert [(each.row["prompt"][0]["content"], each.picked) for each in worst] == [
        ("asked 2", ["mean score falls by 1.25 SFT deviations"]), ("asked 3", ["KL of 61.5 nats"]),
        ("asked 1", ["KL of 33 nats"]),
    ]  # fmt: skip


def test_a_response_with_a_line_separator_of_unicode_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = evaluation()
    rows[0]["policy"]["response"] = "one\u2028two\x85three"
    monkeypatch.setattr(stored, "evaluation", lambda: rows)
    stored_run(tmp_path)
    policy = run_facts(tmp_path).policy
    assert policy.evaluated == 9
    assert policy.samples[2].row["policy"]["response"] == "one\u2028two\x85three"


def test_a_stopped_run_says_which_gate_and_nothing_of_what_did_not_run(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.policy.kl=2.5"])
    facts = run_facts(tmp_path)
    assert facts.status.state == "gate_failed"
    assert ending(facts) == []
    assert facts.verdict.sentence == (
        "Stopped at ppo: the gate policy.kl failed: policy/kl_high is 2.789 and must be ≤ 2.5; it is 12 % above the "
        "bound."
    )
    assert facts.gates[0].verdict.name == "policy.kl", "what failed comes first"
    assert facts.stages[4].status.state == "not_run" and facts.stages[4].by is None
    assert facts.comparison is None
    assert facts.stage("ppo").curves, "what PPO did is there all the same"


def test_a_hit_has_the_curves_of_the_run_that_computed_it_and_names_that_run(tmp_path: Path) -> None:
    first = stored_run(tmp_path)
    stored_run(tmp_path, OTHER, by=first)
    facts = run_facts(tmp_path, OTHER)
    assert facts.status.run == OTHER
    assert {(stage.by, stage.status.cached) for stage in facts.stages} == {(first, True)}
    assert (facts.stage("sft").by, facts.stage("ppo").by) == (first, first)
    assert facts.stage("ppo").curves["ppo/beta"] == curve("ppo/beta")
    assert facts.stages[1].status.seconds == 0.5
    assert facts.stages[1].record is not None and facts.stages[1].record.seconds == 12.5


def test_a_waiver_stands_with_who_and_why(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.policy.kl=2.5"], waive={"policy.kl": "known drift"})
    facts = run_facts(tmp_path)
    gate = next(each for each in facts.gates if each.verdict.name == "policy.kl")
    assert (gate.outcome, gate.verdict.user, gate.verdict.reason) == ("WAIVED", "ada", "known drift")
    assert [each.verdict.user for each in facts.gates if each.outcome != "WAIVED"] == [None] * (len(facts.gates) - 1)
    assert facts.status.state == "waived"
    assert "; waived: policy.kl." in facts.verdict.sentence


@pytest.mark.parametrize("stage", ["sft", "ppo"])
def test_lost_points_are_taken_from_where_they_still_are(tmp_path: Path, stage: str) -> None:
    run = stored_run(tmp_path)
    forget(tmp_path, run, stage, "points.jsonl")
    name = {"sft": "sft/train_loss", "ppo": "ppo/kl"}[stage]
    assert run_facts(tmp_path).stage(stage).curves[name] == curve(name), "the run's own"
    (tmp_path / "runs" / run / "metrics" / f"{stage}.jsonl").unlink()
    found = run_facts(tmp_path).stage(stage).curves
    assert found.get(name) == (curve(name) if stage == "ppo" else None), "PPO's artifact has its course"


def test_lost_files_and_records_leave_the_rest(tmp_path: Path) -> None:
    run = stored_run(tmp_path)
    forget(tmp_path, run, "ppo", "evaluation.jsonl")
    facts = run_facts(tmp_path)
    assert facts.policy.samples == [] and facts.stage("ppo").curves
    for path in (tmp_path / "store" / "records").glob("*/*.json"):
        path.unlink()
    facts = run_facts(tmp_path)
    assert not any(stage.record for stage in facts.stages) and facts.data.quarantined is None
    assert facts.stage("ppo").metrics == METRICS["ppo"], "what run.json has"


def test_a_run_whose_stage_was_cut_short_has_its_points_so_far(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="sft")
    (tmp_path / "runs" / run / "metrics" / "ppo.jsonl").write_text(
        '{"step": 1, "time": 1, "metrics": {"ppo/kl": 0.5}}\n{"step": 2, "time": 2, "metrics": {"ppo/kl": NaN}}\n'
    )
    facts = run_facts(tmp_path)
    assert facts.stage("ppo").curves == {"ppo/kl": [(1, 0.5)]} and facts.stage("ppo").by is None
