"""Models on one frozen backbone: each is its adapter's, none disturbs another, and files are peft's."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from components.base.errors import UserError
from components.models.adapters import AdapterView, Backbone, load_adapter, save_adapter
from components.models.batching import pad
from components.models.config import AdapterConfig
from components.models.folders import load_reward_model, save_model
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.models.sampling import sampling_copy
from components.ppo.models import weights_digest
from components.reward.scoring import score_tokens

PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)


def perturbed(view: AdapterView, seed: int = 0) -> AdapterView:
    """`view` with weights as training might leave them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in view.parameters():
            weight += 0.1 * torch.randn(weight.shape, generator=generator)
    return view


@pytest.fixture
def backbone(language: Any) -> Backbone:
    return Backbone(copy.deepcopy(language.model))


@pytest.fixture
def batch(language: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, mask, and which tokens count, of four prompts."""
    ids, mask = pad(language.prompts[:4], language.tokenizer.pad_token_id)
    counts = mask.clone()
    counts[:, :3] = False
    return ids, mask, counts


def logprobs(model: Any, batch: tuple[Tensor, Tensor, Tensor], runtime: Runtime) -> Tensor:
    return token_stats(model, *batch, runtime).logprobs


def test_a_new_adapter_is_the_backbone_to_the_bit_and_is_drawn_from_its_seed_alone(
    language: Any, backbone: Backbone, batch: Any, runtime: Runtime
) -> None:
    torch.manual_seed(1)
    stream = torch.random.get_rng_state()
    view = backbone.add("one", AdapterConfig(), seed=5)
    assert torch.equal(torch.random.get_rng_state(), stream), "the global stream is left as it was"
    assert torch.equal(logprobs(view, batch, runtime), logprobs(language.model, batch, runtime))
    torch.manual_seed(2)
    same, other = backbone.add("two", AdapterConfig(), seed=5), backbone.add("three", AdapterConfig(), seed=6)
    a, b, c = (torch.cat([w.flatten() for w in v.parameters()]) for v in (view, same, other))
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_a_view_trains_its_adapter_and_head_and_nothing_else(backbone: Backbone) -> None:
    view = backbone.add("one", AdapterConfig(rank=3), seed=0, score=torch.nn.Linear(24, 1, bias=False))
    assert sum(p.numel() for p in view.parameters()) == 24 + 2 * 3 * (4 * (24 + 24) + 3 * (24 + 64))
    assert list(AdapterView(backbone).parameters()) == []
    view.train().requires_grad_(True)
    assert not backbone.model.training and not any(p.requires_grad for _, p in backbone.weights())


def test_adapters_of_different_shapes_train_side_by_side_and_the_backbone_stays(
    language: Any, backbone: Backbone, batch: Any, runtime: Runtime
) -> None:
    views = {
        "wide": backbone.add("wide", AdapterConfig(rank=4, alpha=4), seed=0),
        "narrow": backbone.add("narrow", AdapterConfig(rank=2, targets=("q_proj", "down_proj")), seed=1),
    }
    reference = AdapterView(backbone)
    before = logprobs(language.model, batch, runtime)
    for view in views.values():
        optimizer = torch.optim.SGD(view.parameters(), 0.5)
        start = logprobs(view, batch, runtime).mean()
        for _ in range(5):
            (-logprobs(view, batch, runtime).mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(logprobs(reference, batch, runtime), before)
        assert logprobs(view, batch, runtime).mean() > start + 0.05
    assert not torch.equal(*(logprobs(view, batch, runtime) for view in views.values()))
    assert {k.split(".")[3] for k in backbone.adapter_weights("narrow")} == {"q_proj", "down_proj"}


def test_a_gradient_is_the_same_whoever_was_asked_before_the_backward_pass(
    backbone: Backbone, batch: Any, runtime: Runtime
) -> None:
    """peft's own switch leaves only the active adapter trainable; a backward pass then drops the other's gradient."""
    policy = perturbed(backbone.add("policy", AdapterConfig(), seed=0)).requires_grad_(True)
    critic = perturbed(backbone.add("critic", AdapterConfig(), seed=1)).requires_grad_(True)

    def gradient(others: tuple[AdapterView, ...]) -> list[Tensor]:
        policy.zero_grad(set_to_none=True)
        loss = logprobs(policy, batch, runtime).sum()
        for other in others:
            logprobs(other, batch, runtime)
        loss.backward()
        return [p.grad for p in policy.parameters()]

    alone = gradient(())
    assert all(g is not None and g.abs().sum() > 0 for g in alone)
    for others in ((critic,), (AdapterView(backbone),), (critic, AdapterView(backbone), policy)):
        assert all(torch.equal(a, b) for a, b in zip(alone, gradient(others), strict=True))
    assert all(p.grad is None for p in critic.parameters())
    policy.requires_grad_(False)
    logprobs(critic, batch, runtime)
    logprobs(policy, batch, runtime)
    assert not any(p.requires_grad for p in policy.parameters()), "a frozen adapter stays frozen when it is asked"


def test_merged_it_computes_the_same_and_the_backbone_keeps_its_bytes(
    language: Any, backbone: Backbone, batch: Any, runtime: Runtime, tmp_path: Path
) -> None:
    view = perturbed(backbone.add("one", AdapterConfig(), seed=0))
    perturbed(backbone.add("two", AdapterConfig(), seed=1))
    expected, before = logprobs(view, batch, runtime), weights_digest(AdapterView(backbone))
    assert (expected - logprobs(language.model, batch, runtime)).abs().max() > 0.1, "the adapter changes something"
    merged = view.merged()
    assert [n for n, _ in merged.named_parameters()] == [n for n, _ in language.model.named_parameters()]
    assert (logprobs(merged, batch, runtime) - expected).abs().max() < 1e-4
    save_model(view, language.tokenizer, tmp_path)
    assert (logprobs(AutoModelForCausalLM.from_pretrained(tmp_path), batch, runtime) - expected).abs().max() < 1e-4
    assert weights_digest(AdapterView(backbone)) == before
    assert torch.equal(logprobs(view, batch, runtime), expected)
    plain = AdapterView(backbone).merged()
    assert torch.equal(logprobs(plain, batch, runtime), logprobs(language.model, batch, runtime))


def test_in_bfloat16_a_merged_copy_is_sampled_from(backbone: Backbone, batch: Any, runtime: Runtime) -> None:
    view = perturbed(backbone.add("one", AdapterConfig(), seed=0))
    with sampling_copy(view, runtime) as sampler:
        assert sampler is view
    half = runtime.model_copy(update={"dtype": "bfloat16"})
    with sampling_copy(view, half) as sampler:
        assert {p.dtype for p in sampler.parameters()} == {torch.bfloat16}
        drift = (logprobs(sampler, batch, half) - logprobs(view, batch, half)).abs().mean()
    assert drift < 0.05 < (logprobs(AdapterView(backbone), batch, half) - logprobs(view, batch, half)).abs().mean()


@pytest.mark.parametrize("changed", ["backbone", "adapter", "head"])
def test_a_digest_tells_a_change_of_backbone_adapter_or_head_and_of_nothing_else(
    backbone: Backbone, changed: str
) -> None:
    view = backbone.add("one", AdapterConfig(), seed=0, score=torch.nn.Linear(24, 1, bias=False))
    other = backbone.add("two", AdapterConfig(), seed=1)
    before = weights_digest(view)
    perturbed(other)
    assert weights_digest(view) == before
    weights = {
        "backbone": backbone.model.base_model.layers[1].mlp.up_proj.base_layer.weight,
        "adapter": next(iter(view.adapter.values())),
        "head": view.score.weight,
    }
    with torch.no_grad():
        weights[changed].view(-1)[-1] += 1e-4
    assert weights_digest(view) != before


@PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED
def test_peft_loads_a_language_models_adapter_onto_the_backbone(
    language: Any, backbone: Backbone, batch: Any, runtime: Runtime, tmp_path: Path
) -> None:
    from peft import PeftModel

    view = perturbed(backbone.add("one", AdapterConfig(rank=3, alpha=7), seed=0))
    save_adapter(view, tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    theirs = PeftModel.from_pretrained(copy.deepcopy(language.model), tmp_path).eval()
    ids, mask, _ = batch
    with torch.no_grad():
        found = theirs.model.model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
        ours = view.base_model(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    assert torch.allclose(found[mask], ours[mask], atol=1e-6)


@PEFT_ASKS_FOR_WHAT_TRANSFORMERS_RENAMED
def test_peft_loads_a_reward_models_adapter_with_its_head_and_so_do_we(
    stages: Any, batch: Any, runtime: Runtime, tmp_path: Path
) -> None:
    from peft import PeftModel

    from components.models.folders import load_causal_lm

    folder, (ids, mask, _) = stages.inputs["sft"], batch
    model, _ = load_reward_model(folder, runtime, seed=3)
    view = perturbed(Backbone(model).add("reward", AdapterConfig(rank=3), 0, model.score))
    save_adapter(view, tmp_path)
    with torch.no_grad():
        expected = score_tokens(view, ids, mask, runtime)
        whole = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        theirs = PeftModel.from_pretrained(whole, tmp_path).eval()
        found = theirs(input_ids=ids, attention_mask=mask.long()).logits.squeeze(-1)
        ours = load_adapter(Backbone(load_causal_lm(folder, runtime)[0]), "critic", tmp_path)
        torch.testing.assert_close(score_tokens(ours, ids, mask, runtime), expected)
    assert torch.allclose(found, expected, atol=1e-5) and expected.std() > 1e-3


def test_what_does_not_fit_is_the_users_mistake(language: Any, backbone: Backbone, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Set reward\.lora"):
        load_adapter(backbone, "reward", tmp_path / "adapter")
    save_adapter(backbone.add("one", AdapterConfig(), seed=0), tmp_path)
    other = copy.deepcopy(language.model)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1
    with pytest.raises(UserError, match="trained on another model"):
        load_adapter(Backbone(other), "reward", tmp_path)
    for targets in (("q_prj",), ("q_proj", "v_prj"), ("mlp",)):
        with pytest.raises(UserError, match=r"lora\.targets"):
            backbone.add("two", AdapterConfig(targets=targets), seed=0)
