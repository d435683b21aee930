"""How a report begins: each end of a run in one sentence, and commands that go on from there."""

import json
from pathlib import Path

import pytest

from flows.reports.page import marked
from flows.reports.verdict import RunVerdict, run_verdict
from tasks.runs.awaited_labels import LabelProgress
from tasks.runs.config import run_values
from tasks.runs.status import load_status
from tests.stored_run import stored_run

RUN = "20260101-000000-aaaa"


JUDGED = [
    "promote=true", "gates.reward.accuracy_low=0.7", "gates.policy.reward_gain_low=0",
    "gates.human_eval.win_rate_low=0.5",
]  # fmt: skip


def told(home: Path, labels: LabelProgress | None = None) -> RunVerdict:
    return run_verdict(load_status(home), run_values(home, RUN), labels, "tether-policy")


def commands(found: RunVerdict) -> list[str]:
    return [step.command for step in found.steps if step.command]


def test_a_failed_gate_names_the_option_the_value_to_try_and_the_command(tmp_path: Path) -> None:
    changes = ["gates.policy.kl=2.5", "ppo.kl.control=adaptive", "ppo.updates=90", "ppo.kl.target=2"]
    stored_run(tmp_path, changes=changes)
    found = told(tmp_path)
    assert "policy/kl_high is 2.789 and must be ≤ 2.5; it is 12 % above the bound" in found.sentence
    assert "Here ppo.kl.target is 2; try 1.6." in found.steps[0].text  # 0.9 x 2 x 2.5 / 2.789 = 1.61
    assert commands(found) == [
        f"tether rerun ppo --from {RUN} --set ppo.kl.target=1.6",
        f"tether rerun ppo --from {RUN} --waive policy.kl --because TEXT",
    ]


def test_advice_names_no_option_that_the_method_refuses(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["policy.method=dpo", "gates.policy.kl=2.5"])
    text = told(tmp_path).steps[0].text
    assert "ppo.kl.target" not in text and "ppo.learning_rate" not in text
    assert "raise `ppo.kl.band`, which the gate takes" in text and text.endswith("Here policy.beta is 0.1; try 0.2.")


def test_several_failed_gates_are_counted_and_one_command_tries_all_of_their_changes(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.policy.kl=2.5", "gates.policy.demonstration_perplexity_ratio=1.2"])
    found = told(tmp_path)
    assert found.sentence.startswith("Stopped at ppo: 2 gates failed. The first, policy.kl: ")
    again = f"tether rerun ppo --from {RUN} --set ppo.kl.coefficient=0.2 --set ppo.ptx.coefficient=0.5"
    assert commands(found)[0] == again


@pytest.mark.parametrize(
    ("method", "tighter", "looser"),
    [
        ("ppo", "ppo.kl.coefficient=0.2", "ppo.kl.coefficient=0.05"),
        ("dpo", "policy.beta=0.2", "policy.beta=0.05"),
    ],
)
def test_no_tighter_tether_is_advised_where_kl_is_below_its_floor(
    method: str, tighter: str, looser: str, tmp_path: Path
) -> None:
    """KL is 2.345 with an upper end of 2.789: the first floor is below it, the second above."""
    failing = ["gates.policy.kl=2.5", "gates.policy.dissimilarity=2", f"policy.method={method}"]
    for floor, sets in ((1, tighter), (3, looser)):
        home = tmp_path / str(floor)
        stored_run(home, changes=[*failing, f"gates.policy.kl_floor={floor}"])
        found = told(home)
        assert commands(found)[0] == f"tether rerun ppo --from {RUN} --set {sets}"
        assert "kl_floor" not in commands(found)[1], "a gate that only warns needs no waiver"
    steps = {step.text.partition(":")[0]: step.text for step in found.steps}
    assert "too strong a tether" in steps["policy.kl_floor"]
    assert "Lower `ppo.kl.target`" not in steps["policy.kl"] + steps["policy.dissimilarity"]
    below = "KL (2.345) is below its floor (3): do not tighten the tether."
    assert steps["policy.kl"].endswith(below) and steps["policy.dissimilarity"].endswith(below)


def test_a_gate_that_no_option_helps_has_the_command_of_its_advice_for_this_run(tmp_path: Path) -> None:
    stored_run(tmp_path, changes=["gates.policy.length_ratio=null", "gates.human_eval.reward_agreement_low=0.6"])
    assert any(RUN in command and "--waive" not in command for command in commands(told(tmp_path)))


def test_a_passed_run_names_its_tightest_gate_and_what_follows(tmp_path: Path) -> None:
    stored_run(tmp_path)
    found = told(tmp_path)
    tightest = "policy.length_ratio, inside the range by 17 % of its width"  # (1.0 - 0.2) / (5 - 0.2)
    off = "reward accuracy, gain in reward, win rate, 59 gates that are off"
    assert found.sentence == f"Passed: all 16 judged gates hold; not judged: {off}. The tightest is {tightest}."
    assert commands(found)[:2] == [
        f"tether rerun human_eval --from {RUN} --set human_eval.judges=people",
        f"tether export {RUN} FOLDER",
    ]
    assert any("not a candidate for promotion: its profile is for trying things" in step.text for step in found.steps)


def test_gates_with_too_few_pairs_are_named_beside_those_that_are_off(tmp_path: Path) -> None:
    stored_run(tmp_path)
    status = load_status(tmp_path)
    reward = status.stage("reward")
    few = [gate.model_copy(update={"threshold": None, "within": 0.2}) for gate in reward.gates
           if gate.name == "reward.ece"]  # fmt: skip
    reward.gates = [gate for gate in reward.gates if gate.name != "reward.ece"] + few
    assert "win rate, reward.ece (too few pairs to judge), " in run_verdict(status, run_values(tmp_path, RUN)).sentence


def test_a_waived_run_is_not_called_champion(tmp_path: Path) -> None:
    changes = [*JUDGED, "gates.policy.kl=2.5", "human_eval.judges=people"]
    stored_run(tmp_path, changes=changes, waive={"policy.kl": "known"})
    found = told(tmp_path)
    assert "; waived: policy.kl." in found.sentence and "Passed" not in found.sentence
    assert commands(found)[0] == "tether promote tether-policy/VERSION"


@pytest.mark.parametrize(
    ("state", "sentence", "command"),
    [
        ("interrupted", "The stage ppo was interrupted.", f"tether rerun ppo --from {RUN}"),
        ("failed", "The stage ppo failed.", f"tether rerun ppo --from {RUN}"),
        (
            "awaiting_labels",
            "Waits for people's labels. At the last check, 57 of 144 labels (39 %) were in",
            f"tether people page {RUN}",
        ),
    ],
)
def test_other_ends_say_how_to_go_on(tmp_path: Path, state: str, sentence: str, command: str) -> None:
    stored_run(tmp_path, upto="reward")
    path = tmp_path / "runs" / RUN / "run.json"
    document = json.loads(path.read_text())
    document["stages"][3]["state"] = state
    path.write_text(json.dumps(document))
    found = told(tmp_path, LabelProgress(57, 144))
    assert found.sentence.startswith(sentence) and commands(found)[0].startswith(command)


def test_a_run_that_ended_before_a_stage_says_which_command_goes_on(tmp_path: Path) -> None:
    stored_run(tmp_path, upto="reward")
    assert commands(told(tmp_path)) == [f"tether rerun ppo --from {RUN}"]


def test_backticks_become_code_and_what_stands_in_them_stays_text() -> None:
    assert marked("`a<b>` & c") == "<code>a&lt;b&gt;</code> &amp; c"
