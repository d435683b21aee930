"""The reward stage: the Bradley-Terry loss, what of a pair is trained on, and the unit of the scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import CheckFailed
from components.data.tables.published import read_split
from components.models.adapters import Backbone, load_adapter
from components.models.config import GenerationConfig
from components.models.folders import load_causal_lm, load_reward_model
from components.models.runtime import Runtime
from components.models.sampling import generate_responses
from components.reward import stage
from components.reward.scoring import ScoreScale, member_folder, score_sequences
from components.reward.training_pairs import encode_pairs
from tests.components.conftest import of_steps


def test_both_sides_of_a_pair_share_the_prompt_and_end_in_eos(language: Any) -> None:
    row = {"prompt": [{"role": "user", "content": "Anna here."}], "chosen": "Goodbye.", "rejected": "Best wishes."}
    (pair,) = encode_pairs(language.tokenizer, [row], GenerationConfig())
    decode = language.tokenizer.decode
    assert decode(pair.chosen) == "<|user|>Anna here.<|end|><|assistant|>Goodbye.<|end|>"
    assert decode(pair.rejected) == "<|user|>Anna here.<|end|><|assistant|>Best wishes.<|end|>"
    (cut,) = encode_pairs(language.tokenizer, [row], GenerationConfig(max_new_tokens=2))
    assert decode(cut.rejected).endswith("<|assistant|>Best wishes")


@pytest.fixture(scope="module")
def trained(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("reward")
    return out, stages.run("reward", out)


def test_every_metric_is_there_and_finite(trained: tuple[Path, dict[str, float]]) -> None:
    out, metrics = trained
    names = (
        "accuracy accuracy_low accuracy_high ece ece_null_95 calibration_slope brier log_loss temperature "
        "length_accuracy length_gain_low majority_accuracy invariance shift scale test_pairs"
    )
    assert {f"reward/{name}" for name in names.split()} <= metrics.keys()
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())
    assert metrics["reward/invariance"] <= 1e-4
    assert metrics["reward/test_pairs"] == 30
    assert metrics["reward/position_invariance"] <= 1e-4
    assert metrics["reward/slices_judged"] == 0 and "reward/slice_accuracy_low" not in metrics, "30 pairs are too few"
    names = "ece_width ece_width_null_95 balanced_length_accuracy length_partial_correlation_high probe_texts"
    assert {f"reward/{name}" for name in names.split()} <= metrics.keys() and "reward/disagreement_auroc" not in metrics
    assert json.loads((out / "artifact" / "metrics.json").read_text()) == metrics


def test_sft_responses_score_0_on_average_with_deviation_1(
    stages: Any, trained: tuple[Path, dict[str, float]], runtime: Runtime
) -> None:
    from components.models.batching import encode_prompt
    from components.training.loop import torch_seed

    job = stages.job("reward")
    model, tokenizer = load_reward_model(trained[0] / "artifact", runtime)
    scale = ScoreScale.read(trained[0] / "artifact")
    sft, _ = load_causal_lm(stages.inputs["sft"], runtime)
    rows = read_split(stages.inputs["data"] / "prompts.calibration")[: job.reward.scale_responses]
    prompts = [row["prompt"] for row in rows]
    seed = torch_seed(job.seed, "reward", "scale")
    responses = generate_responses(sft, tokenizer, prompts, job.generation, seed, runtime)
    texts = [
        encode_prompt(tokenizer, p, job.generation.max_prompt_tokens) + r.token_ids
        for p, r in zip(prompts, responses, strict=True)
    ]
    scores = scale(score_sequences(model, tokenizer.pad_token_id, texts, runtime))
    assert scores.mean().item() == pytest.approx(0, abs=1e-4) and scores.std().item() == pytest.approx(1, abs=1e-4)
    assert scale.responses == len(prompts) == 16
    assert scale.missing_eos_score == pytest.approx(scores.double().quantile(0.01).item(), abs=1e-4), "SFT's worst"


@pytest.mark.parametrize("options", [{"learning_rate": 1e-2}, {"lora": {"rank": 4}, "learning_rate": 3e-2}])
def test_it_learns_the_pairs_it_trains_on(stages: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    seen: list[dict[str, float]] = []
    stages.run("reward", tmp_path, of_steps(lambda step, metrics, **_: seen.append(dict(metrics))),
               epochs=24, max_pairs=32, checkpoint_every=100, **options)  # fmt: skip
    assert len(seen) == 48, "two batches of 16 of the first 32 pairs, 24 times"
    accuracy, loss = (sum(step[f"reward/train_{name}"] for step in seen[-2:]) / 2 for name in ("accuracy", "loss"))
    assert accuracy == 28 / 32, "4 of 32 pairs are identical once cut"
    assert loss < 0.2 < seen[0]["reward/train_loss"]


def test_a_reward_model_that_tells_nothing_apart_is_refused(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stage.score_sequences
    monkeypatch.setattr(stage, "score_sequences", lambda *a, **k: whole(*a, **k) * 0 + 3)
    monkeypatch.setattr(stage, "_calibrate", lambda *a: (1.0, {}, {}))
    with pytest.raises(CheckFailed, match="same score"):
        stages.run("reward", tmp_path)


@pytest.mark.parametrize("at", [1, 4, 7])
def test_interrupted_and_started_again_it_ends_with_the_same_bytes(
    stages: Any, trained: tuple[Path, Any], tmp_path: Path, at: int, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    report = interrupting(at)  # 7 steps, a checkpoint every 2: before the first, after the second, after the last
    with pytest.raises(KeyboardInterrupt):
        stages.run("reward", tmp_path, report)
    again = interrupting(-1)
    assert stages.run("reward", tmp_path, again) == trained[1]
    assert again.steps == list(range(at // 2 * 2 + 1 if at < 7 else 8, 8)), "it goes on from its last checkpoint"
    assert digests(tmp_path / "artifact") == digests(trained[0] / "artifact")


LORA = {"lora": {"rank": 4}, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def adapted(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("adapted")
    return out, stages.run("reward", out, **LORA)


def test_with_lora_the_whole_model_scores_as_the_adapter_on_the_sft_model_does(
    stages: Any, adapted: tuple[Path, dict[str, float]], runtime: Runtime
) -> None:
    from components.reward.scoring import score_sequences

    artifact = adapted[0] / "artifact"
    whole, tokenizer = load_reward_model(artifact, runtime)
    sft, _ = load_causal_lm(stages.inputs["sft"], runtime)
    with_head = load_reward_model(stages.inputs["sft"], runtime, seed=1)[0]
    expected_parameters = [(name, p.shape) for name, p in with_head.named_parameters()]
    assert [(name, p.shape) for name, p in whole.named_parameters()] == expected_parameters
    assert all(torch.equal(a, b) for a, b in zip(
        (p for n, p in sft.named_parameters() if "_proj" not in n),
        (p for n, p in whole.named_parameters() if "_proj" not in n and "score" not in n), strict=True,
    )), "what is no linear layer of a block is the SFT model's"  # fmt: skip
    adapter = load_adapter(Backbone(sft), "reward", artifact / "adapter")
    pairs = encode_pairs(tokenizer, read_split(stages.inputs["data"] / "pairs.test"), stages.job("reward").generation)
    scores = [score_sequences(m, tokenizer.pad_token_id, [p.chosen for p in pairs], runtime) for m in (whole, adapter)]
    assert scores[0].std() > 1e-3 and torch.allclose(*scores, atol=1e-4)


def test_members_with_lora_share_one_backbone_and_each_is_published_whole(
    stages: Any, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, train_models = [], stage.train_models
    monkeypatch.setattr(stage, "train_models", lambda *a: (made.append(m) or m for m in train_models(*a)))
    stages.run("reward", tmp_path, members=2, **LORA)
    assert made[0].backbone is made[1].backbone, "the SFT model is held once"
    rows = read_split(stages.inputs["data"] / "pairs.test")
    scores = []
    for folder in (member_folder(tmp_path / "artifact", m) for m in range(2)):
        whole, tokenizer = load_reward_model(folder, runtime)
        sft, _ = load_causal_lm(stages.inputs["sft"], runtime)
        adapter = load_adapter(Backbone(sft), "reward", folder / "adapter")
        texts = [p.chosen for p in encode_pairs(tokenizer, rows, stages.job("reward").generation)]
        by_both = [score_sequences(m, tokenizer.pad_token_id, texts, runtime) for m in (whole, adapter)]
        assert torch.allclose(*by_both, atol=1e-4), "head and adapter of this very member"
        scores.append(by_both[0])
    assert (scores[0] - scores[1]).std() > 1e-3, "members differ"


def test_held_out_evaluations_choose_a_checkpoint_of_each_member_by_pairs_that_no_gate_judges(
    stages: Any, tmp_path: Path, runtime: Runtime, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    options = {
        "members": 2, "epochs": 12, "evaluate_every": 6, "max_pairs": 16, "learning_rate": 1e-1, "decay": "none",
        "watch": {"examples": 30}, "probe_texts": 8,
    }  # fmt: skip
    shown: dict[int, list[dict[str, Any]]] = {}

    def observe(step: int, metrics: Any, samples: Any = None, **_: Any) -> None:
        shown.update({step: samples} if samples else {})

    metrics = stages.run("reward", tmp_path / "whole", observe, **options)
    about = json.loads((tmp_path / "whole" / "artifact" / "metadata.json").read_text())
    assert about["reason"].startswith("Model 1: Step ") and " Model 2: Step " in about["reason"]
    first, second = about["models"]
    assert [look["step"] for look in first["evaluations"]] == [6, 12]
    assert metrics["reward/published_step"] == (first["published_step"] + second["published_step"]) / 2
    rows = read_split(stages.inputs["data"] / "pairs.calibration")[:30]
    losses, right = [], []

    def scored(artifact: Path, member: int) -> list[torch.Tensor]:
        model, tokenizer = load_reward_model(member_folder(artifact, member), runtime)
        pairs = encode_pairs(tokenizer, rows, stages.job("reward").generation)
        sides = [p.chosen for p in pairs], [p.rejected for p in pairs]
        return [score_sequences(model, tokenizer.pad_token_id, side, runtime).double() for side in sides]

    for member, found in enumerate((first, second)):
        chosen, rejected = scored(tmp_path / "whole" / "artifact", member)
        of_both = torch.stack([chosen, rejected], 1).flatten()[:8].tolist()
        texts = [(row["prompt"], row[side]) for row in rows[:4] for side in ("chosen", "rejected")]
        told = shown[12 * member + found["published_step"]]
        assert [each["score"] for each in told] == pytest.approx(of_both, abs=1e-5)
        assert [(each["prompt"], each["response"]) for each in told] == texts
        assert [each["preferred"] for each in told] == [1, 0] * 4
        if found["published_step"] < 12:
            chosen_last, rejected_last = scored(tmp_path / "whole" / "artifact" / "last", member)
            own = float(-torch.nn.functional.logsigmoid(chosen_last - rejected_last).mean())
            assert found["evaluations"][-1]["loss"] == pytest.approx(own, abs=1e-5)
        losses.append(float(-torch.nn.functional.logsigmoid(chosen - rejected).mean()))
        right.append(float((chosen > rejected).double().mean()))
        look = next(each for each in found["evaluations"] if each["step"] == found["published_step"])
        assert look["loss"] == pytest.approx(losses[-1], abs=1e-5)
        assert look["accuracy"] == pytest.approx(right[-1], abs=2.5 / 30), "two pairs are the same text once cut"
    assert metrics["reward/watched_loss"] == pytest.approx(sum(losses) / 2, abs=1e-5)
    assert min(first["published_step"], second["published_step"]) < 12, "16 pairs are overfitted"
    with pytest.raises(KeyboardInterrupt):
        stages.run("reward", tmp_path / "cut", interrupting(20), **options)
    stages.run("reward", tmp_path / "cut", **options)
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")
