"""Matrix products by oneDNN: the numbers of `functional.linear`, with its gradients, packed or not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from components.models.folders import load_causal_lm, load_reward_model, save_model
from components.models.matrices.kernels import OneDnnLinear, by_onednn, packed_weights, product
from components.models.runtime import Runtime

CPU = Runtime(device="cpu", dtype="float32").resolve()
sizes = st.integers(1, 70)


@pytest.fixture
def layer() -> nn.Linear:
    """48 to 80 with a bias."""
    torch.manual_seed(0)
    return nn.Linear(48, 80)


def gradients(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    """Output, and the gradients of its sum of squares by input, weight and bias."""
    x = x.clone().requires_grad_()
    y = layer(x)
    asked = [x, layer.weight, *([layer.bias] if layer.bias is not None else [])]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), asked)]


@pytest.mark.parametrize("bias", [True, False])
def test_a_weight_in_bfloat16_computes_in_the_inputs_float32(bias: bool) -> None:
    torch.manual_seed(0)
    layer = by_onednn(nn.Sequential(nn.Linear(48, 80, bias))).to(torch.bfloat16)[0]
    x = torch.randn(3, 48)
    expected = nn.functional.linear(x, layer.weight.float(), layer.bias.float() if bias else None)
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


@given(rows=sizes, columns=sizes, out=sizes, bias=st.booleans(), dims=st.integers(1, 3))
def test_output_and_gradients_are_those_of_a_linear_layer(
    rows: int, columns: int, out: int, bias: bool, dims: int
) -> None:
    torch.manual_seed(rows)
    plain = nn.Linear(columns, out, bias=bias)
    x = torch.randn(*{1: (), 2: (rows,), 3: (2, rows)}[dims], columns)
    if dims == 1:
        x = x.unsqueeze(0)
    for ours, theirs in zip(gradients(by_onednn(copy.deepcopy(plain)), x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))


def test_float32_products_are_not_rounded_to_bfloat16() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 576), torch.randn(1536, 576)
    exact = x.double() @ weight.double().t()
    error = float((product(x, weight).double() - exact).abs().max() / exact.abs().max())
    assert error < 1e-5  # 1.2e-6 on an AMD EPYC with avx512_bf16; bfloat16 gives 3e-3


def test_a_transposed_or_sliced_operand_is_read_as_it_stands() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(40, 9), torch.randn(33, 40)
    torch.testing.assert_close(product(x.t(), weight), x.t() @ weight.t())
    torch.testing.assert_close(product(weight, x.t()), weight @ x)
    torch.testing.assert_close(product(weight[:, 4:20], weight[3:30, 4:20]), weight[:, 4:20] @ weight[3:30, 4:20].t())


def test_autocast_and_bfloat16_weights_are_left_to_torch(layer: nn.Linear) -> None:
    plain, x = copy.deepcopy(layer), torch.randn(5, 48)
    by_onednn(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.to(torch.bfloat16)(x.bfloat16()), plain.to(torch.bfloat16)(x.bfloat16()))


def test_subclasses_names_and_weights_stay_as_they_are() -> None:
    class Head(nn.Linear):
        """A layer of a kind of its own."""

    model = nn.ModuleDict({"a": nn.Linear(3, 4), "head": Head(4, 1)})
    before = copy.deepcopy(model.state_dict())
    by_onednn(model)
    assert type(model["a"]) is OneDnnLinear
    assert type(model["head"]) is Head
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert type(copy.deepcopy(model)["a"]) is OneDnnLinear


def tiny() -> Any:
    """A Llama of two layers with an output layer that shares its weights with the embedding."""
    torch.manual_seed(0)
    return by_onednn(LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    )).eval())  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_weights_give_the_same_numbers_at_any_number_of_rows(dtype: torch.dtype) -> None:
    model = tiny().to(dtype)
    packs = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    for rows in (1, 8, 33):
        ids = torch.randint(0, 64, (rows, 5), generator=torch.Generator().manual_seed(rows))
        with torch.no_grad():
            plain = model(ids).logits
            with packed_weights(model, 8):
                assert all((m.packed is not None) == packs for m in model.modules() if isinstance(m, OneDnnLinear))
                packed = model(ids).logits
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype] * float(plain.abs().max())
        torch.testing.assert_close(packed, plain, rtol=0, atol=tolerance)


def test_gradients_flow_while_weights_are_packed(layer: nn.Linear) -> None:
    by_onednn(layer).bias.requires_grad_(False)
    with packed_weights(layer, 8):
        layer(torch.randn(2, 48)).sum().backward()
    assert layer.weight.grad is not None and layer.bias.grad is None


def test_loaded_models_use_onednn(tmp_path: Path, language: Any) -> None:
    save_model(language.model, language.tokenizer, tmp_path)
    for loaded in (load_causal_lm(tmp_path, CPU)[0], load_reward_model(tmp_path, CPU, seed=0)[0]):
        linears = [m for m in loaded.modules() if isinstance(m, nn.Linear)]
        assert linears
        assert all(isinstance(m, OneDnnLinear) for m in linears)
