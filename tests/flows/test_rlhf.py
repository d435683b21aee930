"""The pipeline's order, what each stage is given, and where it stops."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from components.base.errors import GateFailed, UserError
from flows import rlhf
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from flows.sources import Sources
from tasks.result import Input
from tests.splits import write_split


class Recorder:
    """A runner that computes nothing and remembers what it was asked for."""

    def __init__(self, folder: Path, stop_at: str = "") -> None:
        self.folder = folder
        self.stop_at = stop_at
        self.calls: list[tuple[str, dict[str, object]]] = []
        (folder / "ratings.simulated.csv").write_text("item\n")

    def __call__(self, stage, job, inputs):
        assert type(job) is stage.load_job()
        self.calls.append(
            (stage.name, {name: given if isinstance(given, Input) else given.name for name, given in inputs.items()})
        )
        if stage.name == self.stop_at:
            raise GateFailed(stage.name)
        return SimpleNamespace(name=stage.name, path=self.folder, record=SimpleNamespace(metrics={}))


def config(**changes: str):
    return load_config("tiny", [parse_override(f"{key}={value}") for key, value in changes.items()]).resolved()


def test_stages_run_in_order_on_each_others_results(tmp_path: Path) -> None:
    runner = Recorder(tmp_path)
    result = rlhf.pipeline(config(), Sources(), runner)
    assert result is not None
    sheet = runner.calls[-1][1].pop("sheet")
    assert sheet == Input.of(tmp_path / "ratings.simulated.csv")
    assert runner.calls == [
        ("validate", {}),
        ("sft", {"data": "validate"}),
        ("reward", {"data": "validate", "sft": "sft"}),
        ("ppo", {"data": "validate", "sft": "sft", "reward": "reward"}),
        ("human_eval.sample", {"data": "validate", "sft": "sft", "ppo": "ppo"}),
        ("human_eval.reward", {"sample": "human_eval.sample", "reward": "reward"}),
        ("human_eval", {"sample": "human_eval.sample", "scores": "human_eval.reward"}),
    ]


def test_a_judge_has_sub_stages_and_ppo_alone_is_given_it(tmp_path: Path) -> None:
    runner = Recorder(tmp_path)
    file = Input(digest="j", path=tmp_path / "careful.jsonl")
    suite = Input(digest="s", path=tmp_path / "suite.json")
    sources = Sources(data={"suite": suite}, judge={"judge_preferences": file})
    rlhf.pipeline(config(**{"data.judge_preferences": "careful.jsonl"}), sources, runner, "ppo")
    assert runner.calls == [
        ("validate.judge", {"judge_preferences": file, "suite": suite}),
        ("validate", {"suite": suite}),
        ("sft", {"data": "validate"}),
        ("reward.judge", {"data": "validate", "sft": "sft", "judge_data": "validate.judge"}),
        ("reward", {"data": "validate", "sft": "sft"}),
        ("ppo", {"data": "validate", "sft": "sft", "reward": "reward", "judge": "reward.judge"}),
    ]


def test_prompts_without_a_category_are_refused_before_a_model_trains(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": "Late?"}]
    write_split(tmp_path / "prompts.train", [{"prompt": prompt, "category": "late"}] * 2 + [{"prompt": prompt}])
    runner, balanced = Recorder(tmp_path), {"ppo.balance": "category", "data.prompts": "own.jsonl"}
    with pytest.raises(UserError, match=r"^ppo.balance: own.jsonl: 1 of the 3 prompts .*'Late\?'.*field `category`"):
        rlhf.pipeline(config(**balanced), Sources(), runner)
    assert [name for name, _ in runner.calls] == ["validate"]
    rlhf.pipeline(config(**balanced | {"ppo.max_prompts": "2"}), Sources(), runner)
    assert runner.calls[-1][0] == "human_eval", "the prompts that PPO does not train on need no category"


@pytest.mark.parametrize("stage", ["validate", "sft", "reward", "ppo"])
def test_nothing_downstream_of_a_failed_gate_starts(tmp_path: Path, stage: str) -> None:
    runner = Recorder(tmp_path, stop_at=stage)
    with pytest.raises(GateFailed):
        rlhf.pipeline(config(), Sources(), runner)
    assert runner.calls[-1][0] == stage


@pytest.mark.parametrize("stage", ["validate", "sft", "reward", "ppo", "human_eval"])
def test_the_pipeline_ends_after_the_stage_that_it_is_told_to_and_gives_its_result(tmp_path: Path, stage: str) -> None:
    runner = Recorder(tmp_path)
    result = rlhf.pipeline(config(), Sources(), runner, stage)
    assert result is not None and result.name == stage == runner.calls[-1][0]


def test_with_people_as_judges_the_pipeline_ends_at_the_sample(tmp_path: Path) -> None:
    runner = Recorder(tmp_path)
    people = config().model_copy(update={"human_eval": config().human_eval.model_copy(update={"judges": "people"})})
    assert rlhf.pipeline(people, Sources(), runner) is None
    assert runner.calls[-1][0] == "human_eval.sample"


def test_peoples_sheet_is_scored_even_where_judges_are_simulated(tmp_path: Path) -> None:
    runner = Recorder(tmp_path)
    (tmp_path / "filled.csv").write_text("item,rating_1\n")
    sheet = Input.of(tmp_path / "filled.csv")
    rlhf.pipeline(config(), Sources(sheet=sheet), runner)
    assert runner.calls[-1][1]["sheet"] == sheet


def test_each_external_input_reaches_its_stages_alone(tmp_path: Path) -> None:
    names = ("preferences", "base", "previous_reward", "previous_data")
    given = {name: Input(digest=name, path=tmp_path / name) for name in names}
    data, base = ({name: given[name]} for name in names[:2])
    previous = {name: given[name] for name in names[2:]}
    runner = Recorder(tmp_path)
    rlhf.pipeline(config(), Sources(data=data, base=base, previous=previous), runner)
    assert runner.calls[:3] == [
        ("validate", {**data, **base}),
        ("sft", {"data": "validate", **base}),
        ("reward", {"data": "validate", "sft": "sft", **previous}),
    ]
    assert all(not given.keys() & inputs.keys() for _, inputs in runner.calls[3:])


def test_a_run_until_validate_needs_no_estimate_of_label_noise(tmp_path: Path) -> None:
    """Only the policy's stage needs it."""
    runner = Recorder(tmp_path)
    direct = config(**{"policy.method": "dpo", "policy.label_smoothing": "auto"})
    result = rlhf.pipeline(direct, Sources(), runner, "validate")
    assert result is not None and result.name == "validate"
