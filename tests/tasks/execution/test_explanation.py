"""Why a stage was computed is said as it computes, and known ever after."""

import re
from pathlib import Path

import pytest

from components.store.records import Record
from tasks.execution import explanation, keying
from tasks.execution.context import Reuse
from tasks.execution.runner import run_stage
from tasks.result import Input
from tasks.runs.status import load_status


@pytest.fixture
def told(home):
    """What is kept of a run's stage."""

    def find(run, stage="sft", part=None):
        document = load_status(home, run).explanations()
        return {each["name"]: each["explained"] for each in document["stages"]}[stage][part or stage]

    return find


@pytest.fixture
def run_once(start, kit):
    """Runs the toy stage `sft` as a run of its own."""

    def run(inputs=None, *, refresh=frozenset(), **job):
        with start(refresh=refresh) as ctx:
            run_stage(kit.toy("sft"), kit.ToyJob(**job), inputs or {}, ctx)
        return ctx

    return run


def test_the_first_computation_says_so_and_a_hit_names_the_run_that_computed(run_once, told, said):
    first, second = run_once(), run_once()
    assert told(first.run)["because"] == "first"
    assert told(second.run) == {"outcome": "hit", "run": first.run, "pinned": False, "differing": []}


def test_a_changed_field_is_said_with_both_values_and_kept(run_once, told, said, home):
    first, second = run_once(value=3), run_once(value=2)
    assert "sft: computing (value 3 -> 2)" in said(second)
    kept = told(second.run)
    assert kept["compared_with"]["run"] == first.run
    assert kept["changes"] == [{"part": "config", "name": "value", "change": "changed", "before": 3, "now": 2}]
    printed = "\n".join(explanation.lines(load_status(home, second.run)))
    assert f"compared with the nearest earlier record (run {first.run}" in printed and "value 3 -> 2" in printed
    assert re.search(r"^ppo +not run$", printed, re.M)


def test_a_hit_names_the_options_in_no_key_that_differ_with_both_values(run_once, told, said, home):
    first, second = run_once(pause=0.0), run_once(pause=0.01, checkpoint=True)
    named = "checkpoint false -> true, pause 0.0 -> 0.01"
    assert f"sft: not in its key, and different in run {first.run}: {named}" in said(second)
    differing = [(each["name"], each["before"], each["now"]) for each in told(second.run)["differing"]]
    assert differing == [("checkpoint", False, True), ("pause", 0.0, 0.01)]
    assert f"computed by {first.run}; not in its key: {named}" in "\n".join(
        explanation.lines(load_status(home, second.run))
    )


def test_a_record_that_kept_only_keyed_options_differs_in_none(kit):
    older = Record(stage="sft", key="k", digest="d", files={}, environment={"python": "3.11.7"})
    assert explanation.unkeyed_changes(older, kit.ToyJob(pause=0.01), {}) == []


def test_an_option_and_an_input_that_fell_out_of_the_key_are_named(run_once, told, monkeypatch):
    one, other = (Input(digest=digest * 64, path=Path("data.jsonl")) for digest in "ab")
    monkeypatch.setattr(keying, "stage_key", lambda *of: ("0" * 64, {"stage": "sft", "job": {}, "inputs": {}}))
    monkeypatch.setattr(Input, "check", lambda source: None)
    first, second = run_once({"data": one}, value=3), run_once({"data": other}, value=2)
    assert told(second.run)["run"] == first.run
    assert [(each["part"], each["name"]) for each in told(second.run)["differing"]] == [
        ("input", "data"), ("config", "value"),
    ]  # fmt: skip


def test_it_is_compared_with_the_nearest_record_and_the_newest_of_those(run_once, told):
    run_once(value=1)
    near = run_once(value=2)
    run_once(value=3, steps=9)
    assert told(run_once(value=4).run)["compared_with"]["run"] == near.run


def test_another_input_file_another_source_and_another_library_are_named(run_once, told, tmp_path, toy_source, kit):
    file = tmp_path / "pairs.jsonl"
    file.write_text("a")
    before = Input.of(file)
    run_once({"preferences": before})
    file.write_text("b")
    now = Input.of(file)
    [change] = told(run_once({"preferences": now}).run)["changes"]
    assert (change["part"], change["name"], change["before"], change["now"]) == (
        "input", "preferences", before.digest, now.digest,
    )  # fmt: skip
    toy_source.write_text(toy_source.read_text().replace("step / 10", "step / 11"))
    [change] = told(run_once({"preferences": now}).run)["changes"]
    assert (change["part"], change["name"], change["change"]) == ("source", "toy_stage.py", "changed")


def test_a_library_with_another_version_is_named_with_both(run_once, told, monkeypatch):
    run_once()
    monkeypatch.setattr("components.keys.fingerprint._version", lambda library: "9.9")
    [change] = told(run_once().run)["changes"]
    assert (change["part"], change["name"], change["now"]) == ("library", "pydantic", "9.9")


def test_a_refresh_of_what_was_never_stored_says_what_changed(run_once, told):
    run_once(value=1)
    assert told(run_once(value=2, refresh=frozenset({"sft"})).run)["because"] == "changed"


def test_a_run_taken_up_again_does_not_refresh_twice_and_keeps_why_it_computed(start, kit, calls, home, told):
    with start() as before:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, before)
    refresh = frozenset({"sft"})
    with start(refresh=refresh) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    again = type(ctx).resume(
        home, ctx.run, ctx.gates, reuse=Reuse(refresh), execution=ctx.execution, reporting=ctx.reporting
    )  # fmt: skip
    with again:
        assert run_stage(kit.toy("sft"), kit.ToyJob(), {}, again).cached
    assert calls() == ["toy", "toy"]
    assert told(ctx.run)["because"] == "asked"


def test_both_parts_of_human_eval_are_explained_and_the_status_keeps_its_fields(start, kit, home, told):
    sample = kit.toy("human_eval.sample")
    with start() as ctx:
        result = run_stage(sample, kit.ToyJob(), {}, ctx)
        run_stage(kit.toy("human_eval"), kit.ToyJob(), {"sample": result}, ctx)
    assert told(ctx.run, "human_eval", "human_eval.sample")["because"] == "first"
    assert told(ctx.run, "human_eval")["because"] == "first"
    assert all("explained" not in stage for stage in load_status(home, ctx.run).stages)


def test_a_run_that_waited_for_anothers_result_says_whose_it_is(start, kit, told, monkeypatch):
    with start() as other:
        result = run_stage(kit.toy("sft"), kit.ToyJob(), {}, other)
    monkeypatch.setattr("tasks.execution.runner.compute_once", lambda *_: (result.record, False))
    with start(refresh=frozenset({"sft"})) as ctx:
        run_stage(kit.toy("sft"), kit.ToyJob(), {}, ctx)
    assert told(ctx.run) == {"outcome": "hit", "run": other.run, "pinned": False, "differing": []}
