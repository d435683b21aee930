"""A backbone in bfloat16 or 4 bits: what it computes, what it takes, and what is published of it."""

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from components.base.errors import UserError
from components.models.adapters import AdapterView, Backbone, tensors_digest
from components.models.batching import pad
from components.models.config import AdapterConfig, GenerationConfig
from components.models.logprobs import token_stats
from components.models.matrices import quantized
from components.models.runtime import Runtime
from components.models.sampling import rollout_engine, sampling_copy
from tests.components.models.test_adapters import perturbed

BFLOAT16 = Runtime(device="cpu", dtype="bfloat16", threads=1, instruction_set="default")
HELD = [("bfloat16", None), ("float32", "4bit"), ("bfloat16", "4bit")]


def adapted(language: Any, dtype: str, quantize: str | None) -> AdapterView:
    """An adapter, as training might leave it, on a copy of the language model."""
    if quantize:
        pytest.importorskip("bitsandbytes", reason="4 bits need bitsandbytes")
    view = Backbone(copy.deepcopy(language.model), dtype, quantize).add("one", AdapterConfig(rank=2), seed=1)
    return perturbed(view, seed=2).requires_grad_(True)


def logprobs(model: Any, language: Any, runtime: Runtime) -> Tensor:
    ids, mask = pad(language.prompts[:4], language.tokenizer.pad_token_id)
    counts = mask.clone()
    counts[:, :3] = False
    return token_stats(model, ids, mask, counts, runtime).logprobs


@pytest.mark.parametrize(("dtype", "quantize"), HELD)
def test_the_merged_model_is_float32_and_computes_what_the_adapter_on_fewer_bits_does(
    language: Any, runtime: Runtime, dtype: str, quantize: str | None
) -> None:
    view = adapted(language, dtype, quantize)
    before = tensors_digest(view.weights())
    merged = view.merged()
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert tensors_digest(view.weights()) == before
    with torch.no_grad():
        mine, its = logprobs(view, language, runtime), logprobs(merged, language, runtime)
        whole = logprobs(language.model, language, runtime)
    assert torch.allclose(mine, its, atol=1e-4)
    assert not torch.allclose(mine, whole, atol=1e-3)  # adapter and rounding are seen


@pytest.mark.parametrize(("dtype", "quantize"), HELD)
def test_only_the_adapter_takes_gradients_and_they_are_float32(
    language: Any, runtime: Runtime, dtype: str, quantize: str | None
) -> None:
    view = adapted(language, dtype, quantize)
    used = runtime.model_copy(update={"dtype": dtype})
    logprobs(view, language, used).sum().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype == torch.float32 for p in view.parameters())
    assert [name for name, p in view.backbone.weights() if p.grad is not None] == []


def test_a_matrix_of_four_bits_takes_an_eighth_and_is_near_the_one_it_was_made_of(language: Any) -> None:
    """NF4's largest gap between values is 0.304 of a block's largest weight: half of it is the worst error."""
    pytest.importorskip("bitsandbytes", reason="4 bits need bitsandbytes")
    torch.manual_seed(0)
    layer = nn.Linear(256, 128)
    held = quantized.four_bit(layer)
    assert held.weight.untyped_storage().nbytes() == layer.weight.numel() // 2
    assert not any(p.requires_grad for p in held.parameters())
    back = quantized.in_float32(held)
    blocks = layer.weight.detach().flatten().view(-1, 64)
    errors = (back.weight.detach().flatten().view(-1, 64) - blocks).abs() / blocks.abs().amax(1, keepdim=True)
    assert errors.max() < 0.304 / 2 + 0.01 and 0.01 < errors.mean() < 0.06
    x = torch.randn(3, 256)
    assert torch.allclose(held(x), back(x), atol=1e-5)


def test_bfloat16_matrices_are_the_same_numbers_that_autocast_rounds_to(language: Any) -> None:
    kept, rounded = copy.deepcopy(language.model), copy.deepcopy(language.model)
    view = Backbone(rounded, "bfloat16").add("one", AdapterConfig(rank=2), seed=1)
    assert {
        m.weight.dtype for m in view.backbone.model.base_model.modules() if type(m).__name__ == "Bfloat16Linear"
    } == {torch.bfloat16}
    assert view.backbone.digest == Backbone(kept).digest  # an adapter of one fits the other
    with torch.no_grad():
        assert torch.equal(logprobs(view, language, BFLOAT16), logprobs(kept, language, BFLOAT16))


def test_the_sampler_of_four_bits_makes_no_copy_and_samples_with_products_in_bfloat16(
    language: Any, runtime: Runtime
) -> None:
    view = adapted(language, "bfloat16", "4bit")
    with sampling_copy(view, BFLOAT16) as sampler:
        assert sampler is view
    with rollout_engine(view, language.tokenizer, BFLOAT16) as engine:
        sampled = engine.sample(language.prompts, GenerationConfig(max_new_tokens=6), 0)
    with torch.no_grad():
        stats = token_stats(view, sampled.ids, sampled.mask, sampled.counts, BFLOAT16)
    apart = (sampled.logprobs[sampled.response_mask] - stats.logprobs).abs()
    assert sampled.stats is None and apart.mean() < 0.02
    with rollout_engine(view, language.tokenizer, runtime) as engine:
        exact = engine.sample(language.prompts, GenerationConfig(max_new_tokens=6), 0)
    same = exact.logprobs.shape == sampled.logprobs.shape and torch.equal(exact.logprobs, sampled.logprobs)
    assert not same  # else its products were not in bfloat16


def test_without_bitsandbytes_an_error_says_what_to_install(language: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    quantized._four_bit_class.cache_clear()
    with pytest.raises(
        UserError, match=r"lora\.quantize=4bit needs bitsandbytes.*pip install 'tether\[bitsandbytes\]'"
    ):
        Backbone(copy.deepcopy(language.model), "float32", "4bit")
