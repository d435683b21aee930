"""What a recorded run says: what caught it, whether its cause was named at the right stage, and whether it did harm."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tests.planted import outcome, page
from tests.planted.catalogue import Fault, read
from tests.planted.copies import SIZE, Ended, Tether
from tests.planted.outcome import Line
from tests.planted.run import Planting, chosen, seeds_of
from tests.planted.test_catalogue import FAULT


def line(**changes: Any) -> Line:
    """A run that ended, with gold 0.5."""
    fields: dict[str, Any] = {
        "fault": "", "digest": "", "commit": "c0ffee", "code": "c0de", "checks": "cafe", "size": [*SIZE],
        "date": "2026-11-28", "seed": 0, "options": [],
        "exit": 0, "stopped_at": "", "gates": [], "warned": [], "message": "", "warnings": "", "crashed": False,
        "seconds": 60.0, "wall": 90.0, "total": 60.0, "waived": [], "end": "passed", "metrics": {"policy/gold": 0.5},
        "digests": {"ppo": "aaaaaaaaaaaa", "human_eval": "bbbbbbbbbbbb"},
    }  # fmt: skip
    fields["beside"] = {name: fields[name] for name in ("metrics", "digests")}
    return cast(Line, fields | changes)


SEEDS = [line(seed=seed, metrics={"policy/gold": gold}) for seed, gold in enumerate((0.4, 0.5, 0.6))]
"""Undisturbed: gold has mean 0.5 and deviation 0.1."""


def test_a_run_that_nothing_stops_or_warns_is_not_caught() -> None:
    assert outcome.caught_by(line(), SEEDS) == ([], "")


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"exit": 3, "gates": ["policy.kl"]}, ["policy.kl"]),
        ({"exit": 1}, ["check"]),
        ({"exit": 1, "message": "tether: the self-check ppo.scale failed, perhaps"}, ["self-check ppo.scale"]),
        ({"exit": 1, "crashed": True}, ["crash"]),
        ({"exit": 2}, ["config"]),
    ],
)
def test_what_stops_a_run_is_told_apart_by_its_exit_code(changes: dict[str, Any], by: list[str]) -> None:
    assert outcome.caught_by(line(stopped_at="ppo", **changes), SEEDS) == (by, "ppo")


def test_an_alarm_that_an_undisturbed_run_raises_too_catches_nothing() -> None:
    warned = line(warned=["alarm flattery"])
    assert outcome.caught_by(warned, SEEDS) == (["alarm flattery"], "ppo")
    assert outcome.caught_by(warned, [*SEEDS, line(seed=3, warned=["alarm flattery"])]) == ([], "")


def test_a_gate_that_stops_an_undisturbed_run_too_catches_nothing() -> None:
    stopped = [*SEEDS, line(seed=3, exit=3, stopped_at="ppo", gates=["policy.special_tokens"])]
    both = line(exit=3, stopped_at="ppo", gates=["policy.special_tokens", "policy.kl"])
    assert outcome.caught_by(both, stopped) == (["policy.kl"], "ppo")
    assert outcome.caught_by(line(exit=3, stopped_at="ppo", gates=["policy.special_tokens"]), stopped) == ([], "")


def test_a_gate_that_warns_is_of_its_own_stage() -> None:
    assert outcome.caught_by(line(warned=["policy.kl_floor"]), SEEDS)[1] == "ppo"
    assert outcome.caught_by(line(warned=["human_eval.ties", "reward.ece"]), SEEDS)[1] == "reward"


def test_a_cause_is_named_only_by_what_is_new() -> None:
    usual = [line(warnings="a sum of few rows")]
    assert outcome.is_named(FAULT, line(exit=1, stopped_at="ppo", message="The SUM is wrong."), usual)
    assert not outcome.is_named(FAULT, line(exit=1, stopped_at="ppo", message="Lower the rate."), usual)
    assert not outcome.is_named(FAULT, line(exit=1, stopped_at="ppo", warnings="a sum of few rows"), usual)
    assert not outcome.is_named(FAULT, line(message="sum"), usual)  # nothing stopped it
    gate = line(exit=3, stopped_at="ppo", gates=["policy.kl"], message="policy.kl is 9: the sum over tokens")
    assert not outcome.is_named(FAULT, gate, usual)  # the gate says so whatever the cause is
    assert outcome.is_named(replace(FAULT, word="kl"), gate, usual)


def test_a_fault_named_after_its_stage_is_named_too_late() -> None:
    assert outcome.at_right_stage(FAULT, "reward") and outcome.at_right_stage(FAULT, "ppo")
    assert not outcome.at_right_stage(FAULT, "human_eval") and not outcome.at_right_stage(FAULT, "")


@pytest.mark.parametrize(("gold", "expected"), [(0.29, "yes"), (0.31, "no"), (0.9, "no")])
def test_gold_below_two_deviations_is_harm(gold: float, expected: str) -> None:
    fallen = line(metrics={"policy/gold": gold})
    assert outcome.harm(FAULT, fallen, SEEDS)[0] == expected  # the limit is 0.5 - 2 x 0.1


def test_harm_is_unknown_without_gold_or_without_seeds() -> None:
    assert outcome.harm(FAULT, line(metrics={}), SEEDS)[0] == "unknown"
    assert outcome.harm(FAULT, line(), SEEDS[:1])[0] == "unknown"


@pytest.mark.parametrize(("gold", "expected"), [(0.69, "yes"), (0.71, "no")])
def test_gold_with_other_options_is_judged_by_the_run_beside_it(gold: float, expected: str) -> None:
    fallen = line(metrics={"policy/gold": gold}, options=["a=1"], beside=line(metrics={"policy/gold": 0.9}))
    assert outcome.harm(FAULT, fallen, [*SEEDS, line(options=["a=1"], metrics={"policy/gold": 0.9})])[0] == expected


@pytest.mark.parametrize(("kl", "expected"), [(3.4, "no"), (3.6, "yes"), (0.0, "yes")])
def test_a_number_off_by_more_than_its_interval_is_harm(kl: float, expected: str) -> None:
    base = line(metrics={"policy/gold": 0.5, "policy/kl": 3.0, "policy/kl_low": 2.5, "policy/kl_high": 3.5})
    fault = replace(FAULT, false_number="policy/kl")
    reported = line(metrics={"policy/gold": 0.5, "policy/kl": kl}, beside=base)
    assert outcome.harm(fault, reported, SEEDS)[0] == expected


def test_promises_are_broken_by_other_bytes_a_wrong_hit_or_a_result_with_the_fault() -> None:
    same, cache = replace(FAULT, promise="same bytes"), replace(FAULT, promise="right cache")
    assert outcome.harm(same, line(same=False), SEEDS)[0] == "yes"
    assert outcome.harm(same, line(same=True), SEEDS)[0] == "no"
    assert outcome.harm(same, line(), SEEDS)[0] == "unknown"
    assert outcome.harm(cache, line(cached=["sft", "ppo"]), SEEDS)[0] == "yes"
    assert outcome.harm(cache, line(cached=["sft"]), SEEDS)[0] == "no"
    held_out = replace(FAULT, promise="held-out")
    assert outcome.harm(held_out, line(digests={"ppo": "cccccccccccc"}), SEEDS)[0] == "yes"
    assert outcome.harm(held_out, line(), SEEDS)[0] == "no"
    assert outcome.harm(held_out, line(digests={}), SEEDS)[0] == "unknown"


def test_false_alarms_count_runs_and_not_warnings() -> None:
    stopped = line(exit=3, gates=["sft.loss"], warned=["alarm flattery"])
    assert outcome.false_alarms([line(warned=["alarm flattery"]), stopped, line(exit=1)]) == {
        "alarm flattery": 2, "check": 1, "sft.loss": 1,
    }  # fmt: skip


def test_an_output_gives_its_error_its_warnings_and_its_crash(tmp_path: Path) -> None:
    output = (
        "  ppo 1/16  ppo/kl 0\n01:41:00.670 | WARNING | components.ppo.stage - update 1: too short.\n"
        "Traceback (most recent call last)\n\ntether: the scale is wrong. Look at the scale.\n"
    )
    measured = outcome.measured(Tether(tmp_path, tmp_path), Ended(1, output, 9.0, 5.0))
    assert measured["message"] == "tether: the scale is wrong. Look at the scale."
    assert measured["warnings"] == "update 1: too short." and measured["warned"] == ["components.ppo.stage"]
    assert measured["crashed"] and measured["seconds"] == 5.0
    doubt = "01:41:00.670 | WARNING | components.gates.self_checks - the self-check ppo.gain is in doubt, perhaps\n"
    noted = f"{doubt}  12.5 s  validate: the same key gave different bytes before (fab0f6f31a2b): a step is not determi"
    warned = outcome.measured(Tether(tmp_path, tmp_path), Ended(0, noted, 9.0, 5.0))["warned"]
    assert warned == ["self-check ppo.gain", "bytes of validate"]
    assert outcome.caught_by(line(warned=warned[1:]), SEEDS) == (["bytes of validate"], "validate")
    other = "  14.1 s  ppo: not in its key, and different in run a1: ppo.kl.target 6.0, it was 2.5\n"
    reused = outcome.measured(Tether(tmp_path, tmp_path), Ended(0, other, 9.0, 5.0))
    assert reused["warned"] == ["options of ppo"] and "ppo.kl.target" in reused["warnings"]


def test_a_fault_keeps_its_newest_line_and_a_seed_one_of_each_size(tmp_path: Path) -> None:
    planting = Planting(tmp_path / "results.jsonl", tmp_path / "work")
    older = {"code": "older", "size": ["ppo.updates=40"]}
    for each in (line(**older), line(fault="a", **older), line(seconds=2.0), line(fault="a", seconds=1.0)):
        planting.write(each)
    assert [(one["fault"], one["code"], one["seconds"]) for one in planting.lines()] == [
        ("", "older", 60.0), ("", "c0de", 2.0), ("a", "c0de", 1.0),
    ]  # fmt: skip


def test_faults_without_a_line_for_todays_checks_come_first_cheap_ones_before_and_the_kinds_in_turn(
    tmp_path: Path,
) -> None:
    def fault(name: str, kind: str, stage: str) -> Fault:
        return replace(FAULT, name=name, after=name, kind=kind, stage=stage)

    planting = Planting(tmp_path / "results.jsonl", tmp_path / "work")
    faults = [
        fault("done", "sft", "sft"), fault("other_code", "sft", "human_eval"), fault("other_checks", "sft", "reward"),
        fault("dear", "ppo", "sft"), fault("cheap", "ppo", "human_eval"), fault("other_size", "ppo", "human_eval"),
    ]  # fmt: skip
    done = {"code": planting.code, "checks": planting.checks}
    changes = done, done | {"code": "older"}, {}, done | {"size": []}
    for each, change in zip([*faults[:3], faults[-1]], changes, strict=True):
        planting.write(line(fault=each.name, digest=each.digest(), **change))
    assert [each.name for each in planting.to_do(faults)] == [
        "cheap", "other_checks", "other_size", "dear", "other_code",
    ]  # fmt: skip


def test_a_sample_depends_on_the_commit_alone_and_an_unknown_name_is_refused() -> None:
    faults = [replace(FAULT, name=f"fault_{i}") for i in range(20)]
    drawn = chosen(faults, [], 3, "c0ffee")
    assert drawn == chosen(faults[::-1], [], 3, "c0ffee") and drawn != chosen(faults, [], 3, "decade")
    assert [fault.name for fault in chosen(faults, ["fault_2"], None, "")] == ["fault_2"]
    with pytest.raises(SystemExit, match="no fault fault_99"):
        chosen(faults, ["fault_99"], None, "")
    assert list(seeds_of("0-2,7")) == [0, 1, 2, 7]


def test_the_page_counts_what_was_caught_and_lists_what_was_not() -> None:
    caught, silent = FAULT, replace(FAULT, name="silent", after="b - a", promise="held-out")
    lines = [
        *SEEDS,
        line(fault=caught.name, digest=caught.digest(), exit=1, stopped_at="ppo", message="The sum.", metrics={}),
        line(fault="silent", digest=silent.digest(), digests={"ppo": "cccccccccccc"}),
    ]
    rows = page.rows_of([caught, silent, replace(FAULT, name="not_run", after="c")], lines)
    assert [(row.fault.name, row.by, row.named, row.harm) for row in rows] == [
        (caught.name, ["check"], True, "unknown"), ("silent", [], False, "yes"),
    ]  # fmt: skip
    text = page.text_of([caught, silent], lines)
    assert "Of 2 faults 1 did harm, 0 did none, and of 1 it is unknown" in text and "1 of these were expected" in text
    assert "Of the 2 that did harm or were expected to, 1 were stopped" in text and "1 of 2 were named" in text
    assert "- `silent` (yes: the promise `held-out` is broken)" in text


def test_the_page_in_the_docs_is_what_the_recorded_lines_say() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.text_of(read(), Planting().lines()), "make planted ARGS=--page"
