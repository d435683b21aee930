"""PPO with `ppo.lora`: policy, reference, critic and reward model are adapters of one frozen SFT model, or none."""

import dataclasses
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from components.base.errors import CheckFailed, UserError
from components.base.jsonl import read_rows
from components.data.tables.published import read_split
from components.models.adapters import Backbone, load_adapter
from components.models.folders import load_causal_lm, load_reward_model
from components.models.logprobs import last_hidden, token_stats
from components.models.runtime import Runtime
from components.models.sampling import Samples
from components.ppo import models, stage
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.evaluate import respond
from components.ppo.learner import Learner
from components.ppo.models import Models, Packed, SeparateCritic, frozen_pass, scatter
from components.training.stopping import Interrupted, graceful

LORA = {"lora": {"rank": 4}, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def adapted(stages: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The stages, with a reward model that is an adapter (of another rank than the policy's will be)."""
    out = tmp_path_factory.mktemp("reward")
    stages.run("reward", out, lora={"rank": 3}, learning_rate=1e-2)
    return type(stages)(stages.inputs | {"reward": out / "artifact"})


@pytest.fixture(scope="module")
def undisturbed(adapted: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, float]]:
    out = tmp_path_factory.mktemp("ppo")
    return out, adapted.run("ppo", out, **LORA)


@pytest.fixture
def loaded(adapted: Any, load: Callable[..., Any]) -> tuple[Any, Models, Samples]:
    """The job, fresh models and eight sampled responses."""
    return load(adapted, **LORA)


def test_the_four_are_one_backbone_and_start_as_whole_models_would(
    adapted: Any, loaded: tuple[Any, Models, Samples]
) -> None:
    job, models, samples = loaded
    views = (models.policy, models.reference, models.reward_model, models.critic.model)
    assert len({id(view.backbone) for view in views}) == 1
    one = sum(p.numel() for _, p in models.reference.weights())
    everything = {id(p): p.numel() for view in views for _, p in view.weights()}
    assert one < sum(everything.values()) < 2 * one
    samples = dataclasses.replace(samples, stats=None)
    here = frozen_pass(models, samples, job)
    there = frozen_pass(Models.load(adapted.job("ppo"), adapted.inputs), samples, job)
    assert torch.equal(here.policy, here.reference) and torch.equal(here.reference, there.reference)
    for name in ("raw_scores", "values"):
        assert torch.allclose(getattr(here, name), getattr(there, name), atol=1e-4) and getattr(here, name).std() > 1e-3
    last = samples.response_mask.sum(1) - 1
    hidden = last_hidden(models.reward_model, *(x[:, :-1] for x in (samples.ids, samples.mask)))
    rows = torch.arange(8)
    scores = models.scale(models.reward_model.score(hidden).squeeze(-1))[rows, samples.prompt_ids.shape[1] + last - 1]
    assert torch.allclose(here.values[rows, last], scores, atol=1e-5), "the critic starts as the reward model"


def test_an_ensemble_of_adapters_scores_on_the_one_backbone_as_its_whole_models_do(
    stages: Any, tmp_path: Path, load: Callable[..., Any]
) -> None:
    stages.run("reward", tmp_path, members=2, lora={"rank": 3}, learning_rate=1e-2)
    there = type(stages)(stages.inputs | {"reward": tmp_path / "artifact"})
    worst = {"score": {"ensemble": "minimum"}}
    job, models, samples = load(there, **LORA, **worst)
    views = (models.policy, models.critic.model, *models.reward_model.members)
    assert len(views) == 4 and len({id(view.backbone) for view in views}) == 1
    samples = dataclasses.replace(samples, stats=None)
    here = frozen_pass(models, samples, job).raw_scores
    whole = frozen_pass(Models.load(there.job("ppo", **worst), there.inputs), samples, job).raw_scores
    assert torch.allclose(here, whole, atol=1e-4) and here.std() > 1e-3
    mean = frozen_pass(Models.load(there.job("ppo", **LORA), there.inputs), samples, job).raw_scores
    assert (here < mean - 1e-5).any() and (here <= mean + 1e-5).all(), "the worst of two is below their mean"


def test_what_trains_is_the_policys_adapter_and_the_critics_with_its_head(loaded: tuple[Any, Models, Samples]) -> None:
    job, models, samples = loaded
    learner = Learner.start(models, job)
    assert {n.split(".")[0] for n, p in models.policy.named_parameters() if p.requires_grad} == {"adapter"}
    assert {n.split(".")[1] for n, p in models.critic.named_parameters() if p.requires_grad} == {"adapter", "score"}
    batch = Packed.of(samples, range(8))
    stats = batch.stats(models.policy, job, with_entropy=False)
    values = models.critic.values(batch, stats.hidden, job.runtime)
    (stats.logprobs.sum() + values.sum()).backward()
    groups = [group for optimizer in learner.optimizers.values() for group in optimizer.param_groups]
    trained = [p for group in groups for p in group["params"]]
    assert all(p.grad is not None for p in trained)
    assert all(p.grad is None for view in (models.reference, models.reward_model) for _, p in view.weights())
    assert len(trained) == len(list(models.policy.parameters())) + len(list(models.critic.parameters()))


def test_the_artifact_holds_the_whole_model_and_the_adapter_and_they_agree(
    adapted: Any, undisturbed: tuple[Path, dict[str, float]], loaded: tuple[Any, Models, Samples], runtime: Runtime
) -> None:
    artifact = undisturbed[0] / "artifact"
    assert {p.name for p in (artifact / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "backbone.json",
    }  # fmt: skip
    history = read_rows(artifact / "history.jsonl")
    assert abs(history[0]["ppo/kl"]) < 1e-5 and all(row["ppo/kl"] != 0 for row in history[1:])
    assert max(row["ppo/sampler_drift"] for row in history) <= 1e-4
    _, _, samples = loaded
    whole, _ = load_causal_lm(artifact, runtime)
    sft, _ = load_causal_lm(adapted.inputs["sft"], runtime)
    with torch.no_grad():
        at_start = token_stats(sft, samples.ids, samples.mask, samples.counts, runtime).logprobs
        found = [
            token_stats(m, samples.ids, samples.mask, samples.counts, runtime).logprobs
            for m in (whole, load_adapter(Backbone(sft), "policy", artifact / "adapter"))
        ]
    assert torch.allclose(*found, atol=1e-4) and (found[0] - at_start).abs().max() > 1e-2
    assert scatter(found[0], samples.response_mask).shape == samples.response_ids.shape


def test_interrupted_and_started_again_it_ends_with_the_same_bytes(
    adapted: Any, undisturbed: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        adapted.run("ppo", tmp_path, interrupting(4), **LORA)
    assert adapted.run("ppo", tmp_path, **LORA) == undisturbed[1]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


@pytest.mark.parametrize(
    ("variant", "adapters"),
    [
        ({"critic": {"kind": "shared"}}, {"policy", "reward"}),
        ({"critic": {"start": "sft"}}, {"policy", "reward", "critic"}),
        (
            {"advantage": "rloo", "group_size": 2, "kl": {"control": "fixed", "refresh_every": 1}},
            {"policy", "reward", "reference"},
        ),
        (
            {"critic": {"kind": "shared", "warmup": 1}, "ema": 0.5, "ptx": {"coefficient": 0.5, "batch_size": 3},
             "evaluate_every": 1, "aggregation": "sequence", "clip_range_high": 0.28, "dual_clip": 3.0},
            {"policy", "reward"},
        ),
    ],
    ids=["shared", "from-sft", "rloo-refresh", "stabilised"],
)  # fmt: skip
def test_a_variant_holds_the_adapters_it_needs_and_resumes_to_the_same_bytes(
    adapted: Any, tmp_path: Path, interrupting: Any, digests: Callable[[Path], Any], variant: Any, adapters: set[str]
) -> None:
    options = LORA | {"updates": 3} | variant
    models = Models.load(adapted.job("ppo", **options), adapted.inputs)
    assert set(models.policy.backbone.configs) == adapters
    adapted.run("ppo", tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        adapted.run("ppo", tmp_path / "cut", interrupting(3), **options)
    adapted.run("ppo", tmp_path / "cut", **options)
    assert digests(tmp_path / "cut" / "artifact") == digests(tmp_path / "whole" / "artifact")


def test_an_earlier_checkpoint_that_is_published_is_the_adapter_that_was_evaluated(
    adapted: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PolicyEvaluations, "is_inside", lambda self, row: row["update"] <= 2)
    options = LORA | {"updates": 4, "evaluate_every": 1, "stop_early": False}
    metrics = adapted.run("ppo", tmp_path, **options)
    artifact, data = tmp_path / "artifact", adapted.inputs["data"]
    about = json.loads((artifact / "metadata.json").read_text())
    assert metrics["ppo/published_update"] == about["published_update"] in (1, 2)
    looks = {look["update"]: look for look in about["evaluations"]}
    assert looks[4]["kl"] > 2 * looks[about["published_update"]]["kl"], "else any policy would do"
    job = adapted.job("ppo", **options)
    loaded = Models.load(job, adapted.inputs)
    prompts = [row["prompt"] for row in read_split(data / "prompts.calibration")[:8]]
    adapter = load_adapter(
        Backbone(load_causal_lm(adapted.inputs["sft"], job.runtime)[0]), "policy", artifact / "adapter"
    )
    for policy in (load_causal_lm(artifact, job.runtime)[0], adapter):
        rows = respond(loaded, policy, prompts, job, data, stream=loaded.answers)
        assert sum(row.kl for row in rows) / 8 == pytest.approx(looks[about["published_update"]]["kl"], abs=1e-3)


@pytest.mark.parametrize("refresh_every", [None, 2], ids=["held", "refreshed"])
@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
def test_stopped_twice_by_sigterm_and_resumed_the_reference_is_to_the_byte_what_it_was(
    lora: bool, refresh_every: int | None, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = request.getfixturevalue("adapted" if lora else "stages")
    options = (LORA if lora else {"learning_rate": 1e-2}) | {"updates": 6, "evaluate_every": None}
    options |= {"monitors": {"responses": None}}
    options |= {"kl": {"control": "fixed", "coefficient": 0.1, "refresh_every": refresh_every}}
    met: list[Any] = []
    gather = stage.gather_experience
    monkeypatch.setattr(stage, "gather_experience", lambda *given: met.append(gather(*given)) or met[-1])
    shared.run("ppo", tmp_path / "whole", **options)
    whole, met[:] = list(met), []
    for stops_in in (2, 4):

        def observe(step: int, *_: Any, stops_in: int = stops_in, **__: Any) -> None:
            if step == stops_in:
                signal.raise_signal(signal.SIGTERM)

        with pytest.raises(Interrupted), graceful():
            shared.run("ppo", tmp_path / "cut", observe, **options)
    assert 2 <= len(met) < 6, "else nothing was resumed"
    shared.run("ppo", tmp_path / "cut", **options)
    artifact = Models.load(shared.job("ppo"), shared.inputs)  # whole models, without an adapter
    for update, (was, now) in enumerate(zip(whole, met, strict=True)):
        assert torch.equal(was.samples.response_ids, now.samples.response_ids)
        assert torch.equal(was.logprobs, now.logprobs)
        assert torch.equal(was.passes.reference, now.passes.reference)
        sft = frozen_pass(artifact, dataclasses.replace(now.samples, stats=None), shared.job("ppo")).sft
        assert torch.equal(now.passes.sft, sft) and sft.abs().max() > 0
        refreshed = refresh_every is not None and update >= refresh_every
        assert torch.equal(now.passes.reference, sft) is not refreshed, update


def test_a_critic_that_starts_as_sft_has_its_head_on_the_device_of_the_run(
    adapted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = adapted.job("ppo", critic={"start": "sft"}, **LORA)
    elsewhere = job.model_copy(update={"runtime": job.runtime.model_copy(update={"device": "meta"})})
    monkeypatch.setattr(models, "load_causal_lm", lambda folder, runtime: load_causal_lm(folder, job.runtime))
    critic = Models.load(elsewhere, adapted.inputs).critic
    assert isinstance(critic, SeparateCritic) and critic.model.score.weight.device.type == "meta"


def test_gradient_checkpointing_recomputes_with_the_adapter_of_the_forward_pass(
    adapted: Any, undisturbed: tuple[Path, dict[str, float]], tmp_path: Path, digests: Callable[[Path], Any]
) -> None:
    assert adapted.run("ppo", tmp_path, gradient_checkpointing=True, **LORA) == undisturbed[1]
    assert digests(tmp_path / "artifact") == digests(undisturbed[0] / "artifact")


@pytest.mark.parametrize(
    ("which", "said"), [("backbone", "SFT policy"), ("adapter", "reward model"), ("score", "reward model")]
)
def test_a_change_of_what_is_held_stops_the_run(
    adapted: Any, tmp_path: Path, which: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Learner.update

    def update(self: Learner, experience: Any, number: int) -> dict[str, float]:
        if number == 1:
            held = self.models.reward_model
            name = next(n for n, _ in held.weights() if n.startswith("model" if which == "backbone" else which))
            with torch.no_grad():
                dict(held.weights())[name].view(-1)[-1].add_(1e-4)
        return whole(self, experience, number)

    monkeypatch.setattr(Learner, "update", update)
    with pytest.raises(CheckFailed, match=f"the {said} changed during training"):
        adapted.run("ppo", tmp_path, updates=2, **LORA)
    assert not (tmp_path / "artifact" / "metrics.json").exists()


def test_a_reward_model_that_is_no_adapter_of_this_sft_model_is_refused(
    stages: Any, adapted: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"trained whole.*Set reward\.lora") as caught:
        stages.run("ppo", tmp_path / "whole", **LORA)
    assert caught.value.exit_code == 2
    reward = tmp_path / "reward"
    for file in (p for p in adapted.inputs["reward"].rglob("*") if p.is_file()):
        copied = reward / file.relative_to(adapted.inputs["reward"])
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_bytes(file.read_bytes())
    (reward / "adapter" / "backbone.json").write_text(json.dumps({"sha256": "0" * 64}))
    with pytest.raises(UserError, match="another model than the SFT model"):
        type(stages)(adapted.inputs | {"reward": reward}).run("ppo", tmp_path / "other", **LORA)
    assert load_reward_model(reward, stages.job("ppo").runtime)[0].config.num_labels == 1


def test_in_bfloat16_it_runs_and_sampler_and_training_path_agree(adapted: Any, tmp_path: Path) -> None:
    from components.ppo import stage

    job = adapted.job("ppo", **LORA | {"updates": 2})
    half = job.model_copy(update={"runtime": job.runtime.model_copy(update={"dtype": "bfloat16"})})
    stage.run(half, adapted.inputs, tmp_path, lambda *a, **k: None)
    drift = [row["ppo/sampler_drift"] for row in read_rows(tmp_path / "artifact" / "history.jsonl")]
    assert len(drift) == 2 and max(drift) <= 0.01
