"""What PPO is given is checked against the artifacts: each check fails on a fault of its own, and by its name."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import CheckFailed
from components.gates.self_checks import SELF_CHECKS, SelfChecks
from components.models import batching
from components.models.chat import rendering
from components.ppo import evaluate, stage
from components.ppo.models import Models
from components.ppo.monitors.boundaries import check_inputs, other_weights
from components.training.trained_weights import WeightAverage

INPUTS = ["ppo.reference", "ppo.tokenizers", "ppo.sft_loss", "ppo.scale", "ppo.reward_scores"]


@pytest.fixture
def judge(stages: Any) -> Callable[..., SelfChecks]:
    """Judge models (fresh ones, after `change`) against the artifacts `inputs`."""

    def judge(change: Callable[[Models], object] = lambda models: None, **inputs: Path) -> SelfChecks:
        job, paths = stages.job("ppo"), stages.inputs_of("ppo") | inputs
        models, checks = Models.load(job, stages.inputs_of("ppo")), SelfChecks()
        change(models)
        check_inputs(checks, models, job, paths)
        return checks

    return judge


def test_healthy_models_pass_and_every_check_is_judged(judge: Callable[..., SelfChecks]) -> None:
    results = judge().results
    assert [name for name in SELF_CHECKS if name in results] == INPUTS
    assert {result.verdict for result in results.values()} == {"held"}


def test_a_reference_that_is_the_policy_or_another_model_is_named(judge: Callable[..., SelfChecks]) -> None:
    def is_policy(models: Models) -> None:
        models.reference = models.sft = models.policy

    def is_noisy(models: Models) -> None:
        with torch.no_grad():
            models.reference.lm_head.weight.mul_(1.001)

    with pytest.raises(CheckFailed, match=r"ppo\.reference failed.*are one object"):
        judge(is_policy)
    with pytest.raises(CheckFailed, match=r"ppo\.reference failed.*as (lm_head|model\.embed)"):
        judge(is_noisy)


def test_prompts_in_another_form_than_sfts_are_in_doubt_even_for_models_that_learned_little(
    judge: Callable[..., SelfChecks], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_generation_prompt(tokenizer: Any, messages: Any) -> str:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, **rendering.FIXED)

    monkeypatch.setattr(batching, "rendered_prompt", without_generation_prompt)
    assert judge().results["ppo.reward_scores"].verdict == "doubtful"


def test_weights_of_sft_that_forgot_its_training_are_named_by_its_loss(
    judge: Callable[..., SelfChecks], stages: Any, tmp_path: Path
) -> None:
    shutil.copytree(stages.inputs["sft"], tmp_path / "sft")
    metrics = json.loads((tmp_path / "sft" / "metrics.json").read_text())
    (tmp_path / "sft" / "metrics.json").write_text(json.dumps(metrics | {"sft/loss": metrics["sft/loss"] / 3}))
    with pytest.raises(CheckFailed, match=r"ppo\.sft_loss failed.*in the record of sft"):
        judge(sft=tmp_path / "sft")


def test_a_loss_on_other_demonstrations_is_in_doubt_and_stops_nothing(
    judge: Callable[..., SelfChecks], stages: Any, tmp_path: Path
) -> None:
    shutil.copytree(stages.inputs["sft"], tmp_path / "sft")
    metrics = json.loads((tmp_path / "sft" / "metrics.json").read_text())
    (tmp_path / "sft" / "metrics.json").write_text(json.dumps(metrics | {"sft/loss": metrics["sft/loss"] * 1.4}))
    assert judge(sft=tmp_path / "sft").results["ppo.sft_loss"].verdict == "doubtful"


def test_a_head_that_was_drawn_anew_is_named(judge: Callable[..., SelfChecks]) -> None:
    def drawn(models: Models) -> None:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            models.reward_model.score.weight.copy_(
                torch.randn(models.reward_model.score.weight.shape, generator=generator)
            )

    with pytest.raises(CheckFailed, match=r"ppo\.reward_scores failed, perhaps because its head"):
        judge(drawn)


def test_a_scale_of_another_unit_is_named(judge: Callable[..., SelfChecks]) -> None:
    def tenfold(models: Models) -> None:
        models.scale = models.scale.model_copy(update={"scale": 10 * models.scale.scale})

    with pytest.raises(CheckFailed, match=r"ppo\.scale failed"):
        judge(tenfold)


def test_a_tokenizer_with_another_template_or_eos_is_named(
    judge: Callable[..., SelfChecks], stages: Any, tmp_path: Path
) -> None:
    shutil.copytree(stages.inputs["reward"], tmp_path / "reward")
    template = tmp_path / "reward" / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("}}", " }}x", 1))
    with pytest.raises(CheckFailed, match=r"ppo\.tokenizers failed.*prompts in the chat template of reward"):
        judge(reward=tmp_path / "reward")


def test_tensors_are_compared_with_their_file_by_name(stages: Any) -> None:
    models = Models.load(stages.job("ppo"), stages.inputs_of("ppo"))
    others, count = other_weights(models.policy, stages.inputs["sft"])
    assert others == [] and count >= 10
    with torch.no_grad():
        models.policy.model.norm.weight.add_(1e-3)
    assert other_weights(models.policy, stages.inputs["sft"]) == (["model.norm.weight"], count)


OPTIONS = {"updates": 3, "learning_rate": 1e-2, "evaluate": 16}


def results_of(out: Path) -> dict[str, str]:
    """The verdicts that a stage wrote, by check."""
    return {row["name"]: row["verdict"] for row in json.loads((out / "attachments" / "self_checks.json").read_text())}


def test_the_results_of_all_checks_are_written_and_held(stages: Any, tmp_path: Path) -> None:
    stages.run("ppo", tmp_path, **OPTIONS)
    results = results_of(tmp_path)
    assert list(results) == ["training.gradients", *(name for name in SELF_CHECKS if name.startswith("ppo."))]
    assert {name for name, verdict in results.items() if verdict != "held"} == {"ppo.first_scores", "ppo.sampled"}


def test_an_evaluation_on_training_prompts_is_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = evaluate.read_split
    monkeypatch.setattr(evaluate, "read_split", lambda path: read(path.with_name(path.name.replace("test", "train"))))
    with pytest.raises(CheckFailed, match=r"ppo\.evaluation_prompts failed.*trained"):
        stages.run("ppo", tmp_path, **OPTIONS)


def test_a_published_model_that_is_not_the_judged_one_is_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = stage.save_policy

    def of_sft(models: Models, folder: Path) -> None:
        policy, models.policy = models.policy, models.sft
        save(models, folder)
        models.policy = policy

    monkeypatch.setattr(stage, "save_policy", of_sft)
    with pytest.raises(CheckFailed, match=r"ppo\.published failed, perhaps because another policy"):
        stages.run("ppo", tmp_path, **OPTIONS)


def test_a_kl_that_is_measured_on_sft_itself_is_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kl_estimates = evaluate.kl_estimates
    monkeypatch.setattr(evaluate, "kl_estimates", lambda p, q, mask: kl_estimates(q, q, mask))
    with pytest.raises(CheckFailed, match=r"ppo\.evaluation failed.*KL is 0.000 nats and here"):
        stages.run("ppo", tmp_path, **OPTIONS)


def test_judged_texts_of_the_next_prompt_are_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = evaluate._rows
    monkeypatch.setattr(evaluate, "_rows", lambda prompts, a, b: rows(prompts, [*a[1:], *a[:1]], b))
    with pytest.raises(CheckFailed, match=r"ppo\.evaluation failed.*in evaluation.jsonl are those of the policy"):
        stages.run("ppo", tmp_path, **OPTIONS)


def test_a_gain_that_kl_does_not_allow_is_in_doubt(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    judged = stage.evaluate
    monkeypatch.setattr(stage, "evaluate", lambda *inputs: judged(*inputs) | {"policy/reward_gain": 9.0})
    stages.run("ppo", tmp_path, **OPTIONS)
    assert results_of(tmp_path)["ppo.gain"] == "doubtful"
    assert "the self-check ppo.gain is in doubt" in caplog.text


def test_true_scores_of_another_text_are_named(stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = evaluate.task_scores
    monkeypatch.setattr(evaluate, "task_scores", lambda data, prompt, text: scores(data, prompt, f"Sorry. {text}"))
    with pytest.raises(CheckFailed, match=r"ppo\.evaluation failed.*true scores \(gold and others\) in evaluation"):
        stages.run("ppo", tmp_path, **OPTIONS)


def test_an_average_that_is_not_published_is_named(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightAverage, "replace", lambda average, model: None)
    with pytest.raises(CheckFailed, match=r"ppo\.published failed.*not those of the moving average"):
        stages.run("ppo", tmp_path, **OPTIONS, ema=0.9)


def test_an_adapter_that_was_not_merged_or_another_one_is_named(stages: Any, tmp_path: Path) -> None:
    stages.run("reward", tmp_path / "reward", lora={"rank": 2})
    inputs = stages.inputs_of("ppo") | {"reward": tmp_path / "reward" / "artifact"}
    models = Models.load(stages.job("ppo", lora={"rank": 2, "targets": ["q_proj", "v_proj"]}), inputs)
    with torch.no_grad():
        for weight in models.policy.adapter.values():
            weight.fill_(0.1)
    stage.save_policy(models, tmp_path)
    others, count = other_weights(models.policy, tmp_path, merged=True)
    assert not others and count > 10
    with torch.no_grad():
        next(iter(models.policy.adapter.values())).fill_(-0.1)
    others, _ = other_weights(models.policy, tmp_path, merged=True)
    assert len(others) == 1 and others[0].endswith("_proj.weight")
