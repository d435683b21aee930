"""A reward model that ignores the prompt or learned the opposite is named, and so is a number of other pairs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from components.base.errors import CheckFailed
from components.data.tables.published import read_split
from components.gates.self_checks import SelfChecks
from components.models.folders import load_reward_model
from components.reward import stage, train
from components.reward.evaluation import model_checks
from components.reward.evaluation.model_checks import check_prompt_use, with_other_prompts
from components.reward.losses import pair_losses
from components.reward.scoring import ScoreScale
from components.stats.calibration.calibration_metrics import calibration, fit_temperature
from tests.splits import write_split

Score = Callable[[str, str], float]


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, stages: Any) -> Callable[..., SelfChecks]:
    """Judge a reward model that is a function of prompt and response, on 250 pairs whose prompts name the answer."""

    def judge(score: Score, task: str = "support-desk", count: int = 250) -> SelfChecks:
        rows = [
            {
                "prompt": [{"role": "user", "content": f"say {i % 7}"}],
                "chosen": f"{i % 7}",
                "rejected": f"{(i + 1) % 7}",
            }
            for i in range(count)
        ]

        def scored(model: Any, pad_id: int, pairs: Any, runtime: Any) -> Any:
            sides = ("chosen", "rejected")
            return tuple(np.array([score(row["prompt"][0]["content"], row[side]) for row in pairs]) for side in sides)

        monkeypatch.setattr(model_checks, "encode_pairs", lambda tokenizer, rows, generation, config: rows)
        monkeypatch.setattr(model_checks, "score_pairs", scored)
        return check_prompt_use(None, type("Tokenizer", (), {"pad_token_id": 0}), rows, stages.job("reward"), task)

    return judge


def noise(text: str) -> float:
    """A number in (0, 0.5) that depends on the text alone."""
    return float(torch.rand(1, generator=torch.Generator().manual_seed(sum(map(ord, text))))) / 2


def by_prompt(prompt: str, response: str) -> float:
    """1 for the answer that the prompt names."""
    return float(prompt.endswith(response)) + noise(response)


def of_the_response(prompt: str, response: str) -> float:
    """A score that knows the chosen responses, without the prompt: they are smaller, save one in seven."""
    return -float(response)


def test_a_model_that_reads_the_prompt_passes(judge: Callable[..., SelfChecks]) -> None:
    result = judge(by_prompt).results["reward.prompt_use"]
    assert result.verdict == "held" and "is 1.000, and" in result.numbers


def test_a_model_that_ignores_the_prompt_is_named(
    judge: Callable[..., SelfChecks], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckFailed, match=r"reward\.prompt_use failed, perhaps because pairs were read"):
        judge(of_the_response)
    assert judge(of_the_response, task="none").results["reward.prompt_use"].verdict == "doubtful"
    assert "reward.prompt_use is in doubt" in caplog.text


def test_few_pairs_and_a_model_near_chance_are_not_judged(judge: Callable[..., SelfChecks]) -> None:
    for checks in (judge(by_prompt, count=100), judge(lambda prompt, response: noise(response))):
        assert checks.results["reward.prompt_use"].verdict == "not judged"


def test_each_row_gets_a_prompt_that_is_not_its_own() -> None:
    rows: list[Any] = [{"prompt": p, "chosen": "", "rejected": ""} for p in "aabbcc"]
    assert [row["prompt"] for row in with_other_prompts(rows)] == [*"bccaab"]
    assert [row["prompt"] for row in with_other_prompts(rows[:2])] == ["a", "a"], "there is no other"


OF_STAGE = ["reward.direction", "reward.test_pairs", "reward.calibration", "reward.sft_scores"]
LEARNS = {"epochs": 24, "max_pairs": 32, "checkpoint_every": 100, "learning_rate": 1e-2}


def results_of(out: Path) -> dict[str, str]:
    """The verdicts that a stage wrote, by check."""
    return {row["name"]: row["verdict"] for row in json.loads((out / "attachments" / "self_checks.json").read_text())}


@pytest.mark.parametrize(
    "options",
    [{}, {"members": 2, "member_share": 0.5}, {"lora": {"rank": 4}, "head_start": "zeros"}, LEARNS],
)
def test_healthy_models_pass(stages: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    stages.run("reward", tmp_path, **options)
    assert {name: verdict for name, verdict in results_of(tmp_path).items() if name in OF_STAGE} == dict.fromkeys(
        OF_STAGE, "held"
    )


def test_what_objectives_and_shares_of_votes_contradict_has_no_direction(stages: Any, tmp_path: Path) -> None:
    """Nobody's votes on an objective need to follow the label, nor does a pair with fewer than half of the votes."""
    inputs = stages.inputs_of("reward")
    shutil.copytree(inputs["data"], tmp_path / "data")
    rows = list(read_split(inputs["data"] / "pairs.train"))
    shutil.rmtree(tmp_path / "data" / "pairs.train")
    against = [row | {"soft_label": 0.0, "objectives": {"brief": 0.0}} for row in rows]
    write_split(tmp_path / "data" / "pairs.train", against)
    for name, options in (("a", {"objectives": {"brief": 1.0}}), ("b", {"labels": "shares"})):
        job = stages.job("reward", **LEARNS | options)
        stage.run(job, inputs | {"data": tmp_path / "data"}, tmp_path / name, lambda *_, **__: None)
        assert results_of(tmp_path / name)["reward.direction"] == "not judged"


def test_a_loss_that_prefers_the_rejected_is_named_by_its_direction(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "pair_losses", lambda chosen, rejected, shares: pair_losses(rejected, chosen, shares))
    with pytest.raises(CheckFailed, match=r"reward\.direction failed.*higher in 0\.[01]\d\d of 32 training pairs"):
        stages.run("reward", tmp_path, **LEARNS)


def test_a_model_that_learned_nothing_may_prefer_the_rejected(stages: Any, tmp_path: Path) -> None:
    """The labels happen to contradict the first head in two of three pairs, which is no direction that it learned."""
    inputs, job = stages.inputs_of("reward"), stages.job("reward", learning_rate=1e-9)
    shutil.copytree(inputs["data"], tmp_path / "data")
    rows = list(read_split(inputs["data"] / "pairs.train"))
    stage.run(job, inputs, tmp_path / "one", lambda *_, **__: None)
    model, tokenizer = load_reward_model(tmp_path / "one" / "artifact", job.runtime)
    margins = model_checks.margins_of(model, tokenizer, rows, job)
    shutil.rmtree(tmp_path / "data" / "pairs.train")
    against, with_it = (
        [row for row, d in zip(rows, margins, strict=True) if (d < 0) == sign] for sign in (True, False)
    )
    write_split(tmp_path / "data" / "pairs.train", [*against[:36], *with_it[:18]])
    stage.run(job, inputs | {"data": tmp_path / "data"}, tmp_path / "two", lambda *_, **__: None)
    assert results_of(tmp_path / "two")["reward.direction"] == "held"


def test_training_pairs_reported_as_test_pairs_are_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misread(folder: Path) -> Any:
        return read_split(folder.with_name("pairs.train") if folder.name == "pairs.test" else folder)

    monkeypatch.setattr(stage, "read_split", misread)
    with pytest.raises(CheckFailed, match=r"test_pairs failed.* 100 pairs were scored, and pairs\.test has 30"):
        stages.run("reward", tmp_path)


def test_a_temperature_of_the_test_pairs_is_named(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calibration and test have 30 pairs each: only their margins tell them apart."""
    scored = list[Any]()

    def first(*args: Any) -> Any:
        scored.append(stage_score_pairs(*args))
        return scored[0]

    stage_score_pairs = stage.score_pairs
    monkeypatch.setattr(stage, "score_pairs", first)
    with pytest.raises(
        CheckFailed, match=r"calibration failed.* margins are [\d.]+ deviations off those of pairs\.cal"
    ):
        stages.run("reward", tmp_path, **LEARNS)


def test_a_temperature_that_does_not_fit_is_named_by_the_slope(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "fit_temperature", lambda margins: 1.5 * fit_temperature(margins))
    with pytest.raises(CheckFailed, match=r"calibration failed.* log loss at the temperature [\d.]+ has the slope"):
        stages.run("reward", tmp_path, **LEARNS)


@pytest.mark.parametrize("fault", ["temperature", "accuracy"])
def test_numbers_of_another_temperature_or_of_other_pairs_are_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def forgotten(margins: Any, clusters: Any, temperature: float, *args: Any, **more: Any) -> Any:
        if fault == "temperature":
            return calibration(margins, clusters, 1.0, *args, **more)
        return calibration(-margins, clusters, temperature, *args, **more)

    monkeypatch.setattr(stage, "calibration", forgotten)
    with pytest.raises(CheckFailed, match=rf"test_pairs failed.*reward/{fault} is [\d.]+, and by the test margins"):
        stages.run("reward", tmp_path, **LEARNS)


def test_answers_to_training_prompts_are_named_where_the_scale_is_measured(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def misread(folder: Path) -> Any:
        return read_split(folder.with_name("prompts.train") if folder.name == "prompts.calibration" else folder)

    monkeypatch.setattr(stage, "read_split", misread)
    with pytest.raises(CheckFailed, match=r"reward\.sft_scores failed.* answers of SFT to prompts\.calibration score"):
        stages.run("reward", tmp_path)


def test_a_scale_that_is_a_variance_is_named_in_the_stage_that_measures_it(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = ScoreScale.measure

    def squared(raw: Any, temperature: float) -> ScoreScale:
        scale = measure(raw, temperature)
        return scale.model_copy(update={"scale": scale.scale**2})

    monkeypatch.setattr(ScoreScale, "measure", squared)
    with pytest.raises(CheckFailed, match=r"reward\.sft_scores failed.*shift [-\d.]+ and scale"):
        stages.run("reward", tmp_path)
