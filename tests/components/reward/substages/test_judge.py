"""A judge's pairs: none that trains the reward, none on a prompt that the run holds out, and its own metrics."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.jsonl import read_rows
from components.data.splits import SPLITS
from components.data.support_desk.desk import SupportDeskConfig, generate_careful, gold
from components.data.tables.published import read_split
from components.models.folders import load_reward_model
from components.models.runtime import Runtime
from components.reward import stage
from components.reward.config import JudgeConfig, JudgeJob, RewardConfig
from components.reward.scoring import ScoreScale
from components.reward.substages import judge
from components.training.loop import torch_seed
from tests.components.conftest import GENERATION, Interrupting
from tests.splits import published, write_split


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": prompt}], "chosen": chosen, "rejected": rejected}


def write(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    """Pairs by split, and their prompts; a split that is not named is empty."""
    for split in SPLITS:
        rows = splits.get(split, [])
        numbered = ({**row, "row": number, "source": "careful"} for number, row in enumerate(rows, 1))
        write_split(folder / f"pairs.{split}", published(numbered))
        write_split(folder / f"prompts.{split}", [{"prompt": row["prompt"], "category": None} for row in rows])
    return folder


def test_a_judge_learns_from_no_pair_of_the_rewards_whatever_its_label_and_from_no_held_out_prompt(
    tmp_path: Path,
) -> None:
    data = write(
        tmp_path / "data", train=[pair("a", "x", "y"), pair("b", "x", "y")], calibration=[pair("c", "x", "y")],
        test=[pair("Why, d?", "x", "y")],
    )  # fmt: skip
    asked = ("a", "x", "y"), ("a", "y", "x"), ("a", "x", "z"), ("c", "p", "q"), ("why d", "p", "q"), ("e", "x", "y")
    offered = [pair(*each) for each in asked]
    rows: list[Any] = [{**row, "row": number, "source": "careful"} for number, row in enumerate(offered, 1)]
    kept, left_out = judge.own_pairs(rows, {"data": data})
    assert [(row["prompt"][0]["content"], row["rejected"]) for row in kept] == [("a", "z"), ("e", "y")]
    assert [row["reason"] for row in left_out] == [judge.SHARED, judge.SHARED, judge.HELD_OUT, judge.HELD_OUT]
    assert [(row["source"], row["row"]) for row in left_out] == [("careful", number) for number in (1, 2, 4, 5)]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A judge's own pairs."""
    rows = generate_careful(5, SupportDeskConfig(judge_pairs=80))
    return write(tmp_path / "own", train=rows[:40], calibration=rows[40:60], test=rows[60:])


def job(stages: Any, **options: Any) -> JudgeJob:
    return JudgeJob(**dict(stages.job("reward")), judge=JudgeConfig(**options))


def test_where_no_pair_is_left_the_error_names_the_first_and_says_what_to_do(stages: Any, tmp_path: Path) -> None:
    train = list(read_split(stages.inputs["data"] / "pairs.train"))
    inputs = {**stages.inputs, "judge_data": write(tmp_path / "own", train=train)}
    with pytest.raises(
        UserError, match=r"none of the 100 pairs .* careful row 1: the reward model trains on this pair\. Give"
    ):
        judge.run(job(stages), inputs, tmp_path, lambda *_, **__: None)
    assert not (tmp_path / "artifact").exists()


def test_a_judge_is_a_reward_model_with_metrics_and_curves_of_its_own(
    stages: Any, own: Path, tmp_path: Path, runtime: Runtime
) -> None:
    observed: set[str] = set()

    def observe(step: int, metrics: Any, total: Any = None, **_: Any) -> None:
        observed.update(metrics)

    metrics = judge.run(job(stages, epochs=2), {**stages.inputs, "judge_data": own}, tmp_path, observe)
    assert {name.startswith("reward/judge_") for name in {*metrics, *observed}} == {True}
    assert (metrics["reward/judge_pairs"], metrics["reward/judge_left_out"]) == (40, 0)
    assert metrics["reward/judge_test_pairs"] == 20 and 0 <= metrics["reward/judge_accuracy_low"] <= 1
    artifact = tmp_path / "artifact"
    assert metrics["reward/judge_scale"] == ScoreScale.read(artifact).scale
    assert read_rows(artifact / "left_out.jsonl") == []
    folders = artifact, stages.inputs["reward"]
    mine, its = (load_reward_model(folder, runtime)[0].score.weight.detach() for folder in folders)
    assert float((mine - its).norm()) > 1, "its head was drawn anew, not the reward model's trained a little otherwise"


def test_a_judges_numbers_are_those_of_the_reward_stage(stages: Any, own: Path, tmp_path: Path) -> None:
    mine = job(stages)
    found = judge.run(mine, {**stages.inputs, "judge_data": own}, tmp_path / "judge", lambda *_, **__: None)
    for split in SPLITS:  # the scale is measured on the run's own prompts
        shutil.rmtree(own / f"prompts.{split}")
        shutil.copytree(stages.inputs["data"] / f"prompts.{split}", own / f"prompts.{split}")
    shutil.copy(stages.inputs["data"] / "task.json", own)
    seed = torch_seed(mine.seed, "judge") % 2**32
    plain = stage.run(mine.as_reward(seed), {**stages.inputs, "data": own}, tmp_path / "plain", lambda *_, **__: None)
    assert {name.replace("reward/", "reward/judge_"): value for name, value in plain.items()} == {
        name: value for name, value in found.items() if name not in ("reward/judge_pairs", "reward/judge_left_out")
    }


def test_an_interrupted_judge_ends_with_the_same_bytes(stages: Any, own: Path, tmp_path: Path, digests: Any) -> None:
    inputs = {**stages.inputs, "judge_data": own}
    judge.run(job(stages), inputs, tmp_path / "whole", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        judge.run(job(stages), inputs, tmp_path / "cut", Interrupting(at=3))
    judge.run(job(stages), inputs, tmp_path / "cut", lambda *_, **__: None)
    assert digests(tmp_path / "whole" / "artifact") == digests(tmp_path / "cut" / "artifact")


def test_its_own_options_replace_the_rewards_and_what_needs_the_rewards_data_is_left_out() -> None:
    reward = RewardConfig(learning_rate=1e-3, epochs=1, members=2, max_pairs=7, objectives={"helpful": 1.0})
    common: dict[str, Any] = {"seed": 3, "runtime": Runtime(), "generation": GENERATION}
    made = JudgeJob(**common, reward=reward, judge=JudgeConfig(epochs=4)).as_reward(seed=9)
    assert (made.seed, made.reward.epochs, made.reward.learning_rate, made.reward.members) == (9, 4, 1e-3, 2)
    assert (made.reward.max_pairs, made.reward.objectives, made.reward.refresh) == (None, {}, None)


def test_careful_annotators_prefer_what_is_better_and_their_pairs_are_the_seeds() -> None:
    config = SupportDeskConfig(judge_pairs=200)
    rows = generate_careful(1, config)
    right = [gold(row["prompt"], row["chosen"]) > gold(row["prompt"], row["rejected"]) for row in rows]  # type: ignore[arg-type]
    assert len(rows) == 200 and sum(right) >= 195, "three annotators whose noise has a deviation of 0.15"
    assert rows == generate_careful(1, config) != generate_careful(2, config)
    assert {row["votes"] for row in rows} == {3} and {row["votes_chosen"] for row in rows} <= {2, 3}
