"""The next round of a run: what it takes import json
from it, and what it refuses."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.gates.table import GATES
from components.store.store import ArtifactStore, Record
from flows.config.profiles import parse_override
from flows.config.run_config import load_config, to_values
from flows.launch.begin import new_run, rerun
from flows.launch.next_round import held, next_round
from flows.reports.compared_rounds import rounds_up_to
from tasks.execution.context import Reporting, RunContext
from tasks.retention.run_archive import export_run, import_results
from tasks.runs.status import load_status
from tests.stored_run import publish, stored_run
from tests.waiting import PATIENCE

FIRST, SECOND = "20260101-000000-aaaa", "20260102-000000-bbbb"
STARTED = "2026-01-01T00:00:01+00:00"
ROW = {
    "prompt": "Late?",
    "a": "Sorry.",
    "b": "So?",
    "votes": [{"annotator": "r", "label": "a"}],
    "judged_in": "0a1b2c3d",
}


def parts(stage: str, run: str = FIRST) -> dict[str, Any]:
    """What the key of a stage is made of: a run's own records stand beside another's."""
    return {"stage": stage, "source": {f"{run}.py": "1"}}


def record_of(home: Path, stage: str, run: str = FIRST) -> Record:
    """The record of a run's stage."""
    return ArtifactStore(home).published(load_status(home, run).stage(stage).key or "")[0]


def judged(home: Path, run: str = FIRST, state: str = "passed", **origin: str) -> str:
    """A run whose policy people judged."""
    config = load_config("tiny", [parse_override(f"gates.{gate.name}=null") for gate in GATES.values()]).resolved()
    values = to_values(config)
    gates, untracked = config.effective_gates, Reporting(track=False)
    ctx = RunContext.start(home, "tiny", gates, config=values, run=run, origin=origin, reporting=untracked)
    with ctx:
        for stage in ("validate", "sft", "reward", "human_eval"):
            row, more = (json.dumps(each) + "\n" for each in (ROW, {"stage": stage}))
            files = {"preferences.jsonl": row, "judged.jsonl": row + more}
            data = load_status(home, run).stage("validate").digest or "d" * 64
            own, inputs = parts(stage, run), {"data": data}
            record = publish(home, stage, run, files=files, inputs=inputs, parts=own, started=STARTED)
            ctx.status.update(stage, state=state, key=record.key, digest=record.digest)
    return run


def test_a_round_takes_votes_reward_model_and_sft_from_the_run_that_people_judged(tmp_path: Path) -> None:
    judged(tmp_path)
    launch = next_round(tmp_path, overrides=[parse_override("ppo.updates=2")])
    store, status = ArtifactStore(tmp_path), load_status(tmp_path, FIRST)
    assert launch.sources.data["votes/1"].digest == status.stage("human_eval").digest, "the edge from batch to data"
    assert launch.sources.previous["previous_reward"].digest == status.stage("reward").digest
    assert launch.sources.taught is not None and launch.sources.taught.digest == status.stage("validate").digest
    assert launch.ctx.reuse.pinned["sft"] == store.lookup(status.stage("sft").key or "", status.stage("sft").digest)
    config = launch.config
    assert (config.data.votes, config.sft.keep, config.ppo.updates) == ((FIRST,), FIRST, 2)
    assert config.reward.refresh is not None and config.reward.refresh.from_run == FIRST
    with launch.ctx:
        pass
    assert load_status(tmp_path, launch.ctx.run).origin == {"round": "1", "votes": FIRST}


def test_a_second_round_adds_its_votes_and_keeps_the_first_sft(tmp_path: Path) -> None:
    judged(tmp_path)
    with (one := next_round(tmp_path, FIRST, [parse_override("reward.refresh.replay=0.5")])).ctx as ctx:
        record = record_of(tmp_path, "human_eval")
        for stage in ("validate", "reward", "human_eval"):
            ctx.status.update(stage, state="gate_failed", key=record.key, digest=record.digest)
    config = next_round(tmp_path, one.ctx.run).config
    assert config.data.votes == (FIRST, one.ctx.run) and config.sft.keep == FIRST
    assert config.reward.refresh is not None
    assert (config.reward.refresh.from_run, config.reward.refresh.replay) == (one.ctx.run, 0.5)


def test_a_run_that_nobody_judged_is_refused_with_what_to_do(tmp_path: Path) -> None:
    run = stored_run(tmp_path, upto="ppo")
    with pytest.raises(UserError, match=r"have not judged its policy \(human_eval: not_run\)"):
        next_round(tmp_path, run)
    with pytest.raises(UserError, match=f"iterate {run}: people have not judged its policy"):
        next_round(tmp_path)
    judged(tmp_path, SECOND, state="awaiting_labels")
    with pytest.raises(UserError, match=f"tether people score SHEETS --run {SECOND}"):
        next_round(tmp_path, SECOND)
    with pytest.raises(UserError, match=r"data\.votes: people have not judged the policy of run"):
        new_run(tmp_path, "tiny", load_config("tiny", [parse_override(f"data.votes=[{run}]")]).resolved())


def test_a_kept_sft_that_is_not_whole_is_no_other_one(tmp_path: Path) -> None:
    judged(tmp_path)
    store = ArtifactStore(tmp_path)
    record = store.lookup(load_status(tmp_path, FIRST).stage("sft").key or "")
    (store.objects / record.files["judged.jsonl"]).unlink()  # type: ignore[union-attr]
    with pytest.raises(UserError, match=rf"sft\.keep = {FIRST}: its SFT model can't be reused.*rerun sft --from"):
        next_round(tmp_path)


def test_iterate_says_that_a_policy_is_held_where_the_reward_model_disagrees(tmp_path: Path) -> None:
    run = stored_run(tmp_path, changes=["gates.human_eval.reward_agreement_low=0.99"])
    (said,) = held(load_status(tmp_path, run))
    assert "human_eval.reward_agreement_low failed" in said and "is not promoted" in said
    assert held(load_status(tmp_path, stored_run(tmp_path, SECOND))) == []


def test_rounds_stand_side_by_side_from_the_first_on_and_other_runs_are_left_out(tmp_path: Path) -> None:
    judged(tmp_path)
    judged(tmp_path, SECOND, round="1", votes=FIRST)
    judged(tmp_path, "20260103-000000-cccc")
    rounds = rounds_up_to(tmp_path, load_status(tmp_path, SECOND))
    assert [(each.run, each.origin.get("round", "0")) for each in rounds] == [(FIRST, "0"), (SECOND, "1")]
    assert rounds_up_to(tmp_path, load_status(tmp_path, FIRST)) == []


@pytest.mark.timeout(PATIENCE * 60)
def test_two_runs_that_name_each_other_do_not_hang_what_shows_rounds(tmp_path: Path) -> None:
    judged(tmp_path, round="2", votes=SECOND)
    judged(tmp_path, SECOND, round="1", votes=FIRST)
    assert {each.run for each in rounds_up_to(tmp_path, load_status(tmp_path, SECOND))} == {FIRST, SECOND}


def test_a_rerun_of_a_round_still_says_whose_votes_it_rests_on(tmp_path: Path) -> None:
    judged(tmp_path)
    with (one := next_round(tmp_path)).ctx as ctx:
        record = record_of(tmp_path, "reward")
        for stage in ("validate", "sft"):
            ctx.status.update(stage, state="passed", key=record.key, digest=record.digest)
    launch = rerun(tmp_path, "validate", one.ctx.run)
    with launch.ctx:
        pass
    origin = load_status(tmp_path, launch.ctx.run).origin
    assert origin == {"round": "1", "votes": FIRST, "stage": "validate", "from": one.ctx.run}


def test_a_round_that_rests_on_imported_results_is_marked_so(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    judged(here)
    judged(here, SECOND, round="1", votes=FIRST)
    for run in (FIRST, SECOND):
        import_results(ArtifactStore(there), export_run(ArtifactStore(here), run, tmp_path / f"{run}.tar"))
    assert not (there / "runs").exists()
    shutil.copytree(here / "runs", there / "runs")  # as docs/guide/commands.md says
    assert [each.run for each in rounds_up_to(there, load_status(there, SECOND))] == [FIRST, SECOND]
    launch = next_round(there, SECOND)
    assert launch.config.data.votes == (SECOND,) and launch.sources.data["votes/1"].imported
    assert launch.sources.previous["previous_reward"].imported
