"""An independent judge in a run: its sub-stages, their keys and gates, and what is left as it was."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import GateFailed, UserError
from components.base.jsonl import write_rows
from components.data.support_desk.desk import SupportDeskConfig, generate_careful
from flows.config.profiles import Override, parse_override
from flows.config.run_config import RunConfig, check_config, load_config, to_values
from flows.launch.begin import Launch, new_run, rerun
from flows.launch.request import Request
from flows.rlhf import pipeline
from flows.sources import find_sources
from tasks.execution.context import Reporting
from tasks.execution.keying import key_of
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.runs.status import StageStatus, load_status
from tasks.stages import OPTIONAL, STAGES

SMALL = ["data.generator.demonstrations=150", "data.generator.pairs=200", "sft.epochs=1", "sft.evaluate=16",
         "ppo.updates=1", "ppo.evaluate=16", "ppo.evaluate_every=1", "gates.policy.evaluated=null",
         "reward.scale_responses=16"]  # fmt: skip


def given(*options: str) -> list[Override]:
    return [parse_override(each) for each in options]


def config(*options: str) -> RunConfig:
    return load_config("tiny", given(*options)).resolved()


@pytest.mark.parametrize("name", [each for each in STAGES if each not in OPTIONAL])
def test_a_judge_changes_nothing_in_the_key_of_another_stage(name: str, tmp_path: Path) -> None:
    (tmp_path / "task.json").write_text('{"name": "none"}')
    judged = config("data.judge_preferences=[a.jsonl,b.jsonl]", "data.judge_columns={chosen: x}", "judge.epochs=3")
    inputs = {"data": Input(path=tmp_path, digest="d" * 64)}
    plain, with_judge = (key_of(STAGES[name], each.stage_job(STAGES[name]), inputs)[0] for each in (config(), judged))
    assert plain == with_judge


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_worker_reads_a_judges_job_back_as_it_was(name: str) -> None:
    asked = config("data.judge_columns={chosen: x}", "judge.epochs=3", "data.judge_preferences=a.jsonl")
    job = asked.stage_job(STAGES[name])
    assert STAGES[name].load_job().model_validate(json.loads(job.model_dump_json())) == job
    assert check_config(to_values(asked), source="again") == asked


def careful(path: Path, count: int, **changed: str) -> Path:
    """A file of careful pairs; `changed` renames columns."""
    rows = generate_careful(3, SupportDeskConfig(judge_pairs=count))
    write_rows(path, [{changed.get(name, name): value for name, value in row.items()} for row in rows])
    return path


def test_a_judges_file_is_looked_at_before_anything_is_computed_and_the_error_names_its_options(tmp_path: Path) -> None:
    file = careful(tmp_path / "careful.jsonl", 5, chosen="better", rejected="worse")
    named = f"data.judge_preferences={file}"
    with pytest.raises(UserError, match=r"^data\.judge_preferences: .*careful\.jsonl"):
        find_sources(config(named), tmp_path)
    with pytest.raises(UserError, match=r"data\.judge_columns names the column 'best'"):
        find_sources(config(named, "data.judge_columns={chosen: best, rejected: worse}"), tmp_path)
    found = find_sources(config(named, "data.judge_columns={chosen: better, rejected: worse}"), tmp_path)
    assert list(found.judge) == ["judge_preferences"] and not found.data


def test_a_file_that_trains_the_reward_is_no_judges(tmp_path: Path) -> None:
    file, copy = careful(tmp_path / "pairs.jsonl", 5), careful(tmp_path / "copy.jsonl", 5)
    with pytest.raises(UserError, match=r"copy\.jsonl holds the same bytes as .*pairs\.jsonl of data\.preferences"):
        find_sources(config(f"data.preferences={file}", f"data.judge_preferences={copy}"), tmp_path)


@pytest.mark.parametrize("options", [["data.preferences=a.jsonl"], ["data.judge_preferences=a.jsonl"]])
def test_generated_judge_pairs_are_refused_beside_files(options: Sequence[str]) -> None:
    with pytest.raises(UserError, match="judge_pairs are pairs of the built-in task"):
        config("data.generator.judge_pairs=10", *options)


def test_a_rerun_of_a_judge_that_the_run_has_not_says_what_to_set(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--refresh reward\.judge: a run has this stage only with data\.judge"):
        new_run(tmp_path, "tiny", config(), request=Request(refresh=["reward.judge"]))
    with pytest.raises(UserError, match=r"reward\.judges: no such stage; there are validate, .*, reward\.judge"):
        new_run(tmp_path, "tiny", config(), request=Request(refresh=["reward.judges"]))


def compute(launch: Launch) -> dict[str, StageStatus]:
    """Run it in this process, without Prefect and MLflow; its stages by name."""
    launch.ctx.reporting = Reporting(track=False)
    with launch.ctx as ctx:
        pipeline(launch.config, launch.sources, partial(run_stage, ctx=ctx), ctx.status.document.until)
    return {stage.name: stage for stage in load_status(ctx.home, ctx.run).stages}


@pytest.mark.whole
def test_a_judge_is_validated_trained_gated_asked_and_rerun_on_its_own(tmp_path: Path) -> None:
    file, home = careful(tmp_path / "careful.jsonl", 80), tmp_path / "home"
    plain = compute(new_run(home, "tiny", config(*SMALL), request=Request(until="reward")))
    judged = config(*SMALL, f"data.judge_preferences={file}")
    first = compute(new_run(home, "tiny", judged, request=Request(until="ppo")))
    for name in ("validate", "sft", "reward"):
        assert first[name].key == plain[name].key and first[name].digest == plain[name].digest, name
    gates: dict[str, Any] = {gate.name: gate for stage in first.values() for gate in stage.gates}
    read = first["validate"].metrics
    assert read["data/judge_pairs"] + read["data/judge_quarantined"] == 80, "some differ only after tiny's ten tokens"
    assert gates["validate.judge_pairs"].value == read["data/judge_pairs"] > 60
    assert gates["validate.judge_contract"].passed
    assert first["reward"].metrics["reward/judge_left_out"] == 0 and first["reward"].metrics["reward/judge_pairs"]
    gain = [first["ppo"].metrics[f"policy/judge_gain{end}"] for end in ("_low", "", "_high")]
    assert gain == [first["ppo"].metrics[f"policy/judge_trained_gain{end}"] for end in ("_low", "", "_high")]
    assert {*first["validate"].parts, *first["reward"].parts} == {"validate.judge", "reward.judge"}

    own = first["reward"].parts["reward.judge"]
    with pytest.raises(GateFailed, match=r"reward\.judge_pairs_left"):
        compute(rerun(home, "reward.judge", None, given(
            "judge.epochs=2",
            "gates.extra.reward.judge_pairs_left={metric: reward/judge_pairs, op: '>=', threshold: 1000}",
        )))  # fmt: skip
    again = {stage.name: stage for stage in load_status(home).stages}
    assert again["reward"].digest == first["reward"].digest and again["validate"].cached
    assert again["reward"].parts["reward.judge"].digest != own.digest
    with pytest.raises(UserError, match=r"tether rerun validate\.judge --from"):
        rerun(home, "reward.judge", None, given(f"data.judge_preferences={careful(tmp_path / 'b.jsonl', 60)}"))
    other = compute(
        rerun(
            home,
            "validate.judge",
            None,
            given(f"data.judge_preferences={tmp_path / 'b.jsonl'}", "gates.extra.reward.judge_pairs_left=null"),
            request=Request(until="reward"),
        )
    )
    assert other["validate"].digest == first["validate"].digest and other["reward"].digest == first["reward"].digest
    read = other["validate"].metrics
    assert read["data/judge_pairs"] + read["data/judge_quarantined"] == 60
