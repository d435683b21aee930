"""The sample of planted faults that .ci/run makes: what is drawn, and what makes it fail."""

from pathlib import Path
from typing import Any

import pytest

from tests.planted.catalogue import Fault, read
from tests.planted.copies import SIZE
from tests.planted.outcome import Line
from tests.planted.run import RESULTS, SMALL, Planting, small_sample, stopped_by, stopped_in_training

FAULTS = {fault.name: fault for fault in read()}


def line_of(name: str, check: str = "ppo.advantages", stage: str = "ppo", **more: Any) -> Line:
    """The line of a fault that a self-check stopped, or with no check one that ran to the end."""
    line = Line(
        fault=name, digest=FAULTS[name].digest() if name else "", stopped_at=stage if check else "", gates=[],
        warned=[], warnings="", exit=int(bool(check)), crashed=False,
        message=f"tether: {stage}: the self-check {check} failed, perhaps because" if check else "",
    )  # fmt: skip
    return Line(**line | more)


class Recorded:
    """In the place of `Planting`: its runs end as they are given."""

    def __init__(self, *lines: Line, commit: str = "0123456789ab") -> None:
        self.given, self.commit = lines, commit

    def lines(self) -> list[Line]:
        return [*self.given]

    def base(self) -> tuple[None, Line]:
        return None, next(line for line in self.given if not line["fault"])

    def plant(self, fault: Fault) -> Line:
        return next(line for line in self.given if line["fault"] == fault.name)


def test_faults_that_a_self_check_stopped_in_training_are_drawn_from_and_no_others() -> None:
    lines = [
        line_of("gae_forward"), line_of("test_pairs_in_training", "validate.splits", "validate"),
        line_of("advantage_sign", ""), line_of("no_whitening", digest="of an earlier wording"),
        line_of("ties_count_as_wins", "human_eval.unblinding", "human_eval"),
        line_of("moments_not_restored_on_resume", "training.resumed"),  # needs another way to run
        line_of("eos_not_learnt", "", "ppo", exit=3, gates=["ppo.kl"], stopped_at="ppo"),
        line_of("kl_sign_flipped", "", "ppo", exit=1, stopped_at="ppo", message="tether: ppo: another reason"),
    ]  # fmt: skip
    drawn_from = stopped_in_training(Recorded(*lines))  # type: ignore[arg-type]
    assert {(fault.name, check) for fault, check in drawn_from} == {
        ("gae_forward", "self-check ppo.advantages"), ("test_pairs_in_training", "self-check validate.splits"),
    }  # fmt: skip


def test_the_recorded_lines_have_enough_to_draw_from() -> None:
    assert len(stopped_in_training(Planting())) >= 6


def test_the_sample_holds_where_the_same_checks_stop_the_faults_and_the_commit_draws_them() -> None:
    names = ["gae_forward", "no_whitening", "advantage_sign", "score_scale_ignored", "critic_untrained"]
    lines = [line_of(""), *map(line_of, names)]
    lines[0] = line_of("", "")
    asked: dict[str, list[str]] = {}
    for commit in ("0123456789ab", "0123456789ab", "ba9876543210", "c0ffee000000", "000000000001"):
        recorded = Recorded(*lines, commit=commit)
        small = Recorded(*lines)
        planted, plant = list[str](), small.plant
        small.plant = lambda fault, planted=planted, plant=plant: planted.append(fault.name) or plant(fault)  # type: ignore
        assert small_sample(3, recorded, small) == []  # type: ignore[arg-type]
        assert len(planted) == 3 and asked.setdefault(commit, sorted(planted)) == sorted(planted)
    assert len({*map(tuple, asked.values())}) > 1


def test_another_check_or_none_or_an_undisturbed_run_in_doubt_makes_the_sample_fail() -> None:
    recorded = Recorded(line_of("gae_forward"))
    other = Recorded(line_of("", ""), line_of("gae_forward", "ppo.gradient"))
    (said,) = small_sample(3, recorded, other)  # type: ignore[arg-type]
    assert said.startswith(
        "gae_forward: self-check ppo.advantages stopped it in the demo; here self-check ppo.gradient"
    )
    (said,) = small_sample(3, recorded, Recorded(line_of("", ""), line_of("gae_forward", "")))  # type: ignore[arg-type]
    assert "here none did" in said
    for undisturbed in (
        line_of("", ""), line_of("", "", warned=["self-check ppo.gain"], warnings="ppo.gain is in doubt")
    ):  # fmt: skip
        small = Recorded(undisturbed | {"exit": 0 if undisturbed["warned"] else 1}, line_of("gae_forward"))  # type: ignore
        (said,) = small_sample(3, recorded, small)  # type: ignore[arg-type]
        assert said.startswith("the undisturbed run: ")


def test_what_stopped_a_run_is_a_self_check_only_by_its_message() -> None:
    assert stopped_by(line_of("gae_forward")) == "self-check ppo.advantages"
    assert stopped_by(line_of("gae_forward", "")) == ""
    assert stopped_by(line_of("gae_forward", exit=2)) == ""


def test_small_runs_have_their_own_profile_options_and_lines(tmp_path: Path) -> None:
    small = Planting(tmp_path / "results.jsonl", tmp_path, SMALL, ("ppo.updates=2",))
    assert small.command((), 0) == ["run", "tiny", "--until", "ppo", "--set", "ppo.updates=2", "--set", "seed=0"]
    assert Planting().command(["a=1"], 3)[:4] == ["run", "demo", "--set", SIZE[0]]
    recorded = RESULTS.read_bytes()
    small.write(line_of("gae_forward", seed=0, options=[], size=[], metrics={}))
    assert RESULTS.read_bytes() == recorded and len(small.lines()) == 1


@pytest.mark.parametrize("file", [".ci/run", "Makefile"])
def test_ci_runs_the_sample(file: str) -> None:
    text = (RESULTS.parents[2] / file).read_text()
    assert {".ci/run": "\nmake planted-sample\n", "Makefile": "tests.planted.run --small 3"}[file] in text
