"""What the plan counts is what torch keeps: bytes of activations, caches, moments and matrices."""

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache

from components.models.adapters import Backbone
from components.models.cache import PREFILL_PARTS, PreallocatedLayer, Window
from components.models.config import AdapterConfig
from components.models.logprobs import LOGITS_AT_ONCE
from components.models.matrices.kernels import by_onednn
from components.models.runtime import Runtime, autocast
from components.models.sampling import generate_responses
from components.planning import memory, models, tensors
from components.planning.shape import ModelShape
from components.planning.tensors import Format, Pass
from components.training import shares
from components.training.loop import recomputed
from components.training.optim import OptimizerConfig, build_optimizer

SHAPE = ModelShape(
    vocabulary=300, hidden_size=64, intermediate_size=176, layers=2, heads=4, kv_heads=2, head_size=16, tied=True
)
ROWS, TOKENS = 3, 40


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=0,
    )  # fmt: skip
    return by_onednn(LlamaForCausalLM(config))


def kept(model: Any, dtype: Format, masked: bool, layers: int, checkpointing: bool = False) -> int:
    """Bytes that autograd keeps of a forward pass through the first `layers` blocks, parameters and their casts left
    out."""
    body = model.backbone.model.model if hasattr(model, "backbone") else model.model
    blocks, body.layers = body.layers, body.layers[:layers]
    body.config.num_hidden_layers = layers
    weights = {p.untyped_storage().data_ptr() for p in body.parameters()}
    shapes = {tuple(p.shape) for p in body.parameters()} | {
        tuple(p.t().shape) for p in body.parameters() if p.ndim == 2
    }
    found: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in weights and tuple(tensor.shape) not in shapes:
            found[where] = tensor
        return tensor

    given: dict[str, Any] = {}
    if masked:
        sees = torch.ones(ROWS, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        given = {"attention_mask": sees, "position_ids": torch.arange(TOKENS).expand(ROWS, -1)}
    runtime = Runtime(device="cpu", dtype=dtype, threads=1)
    config = OptimizerConfig(gradient_checkpointing=checkpointing)
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast(runtime), recomputed(model, config):
            hidden = model.base_model(input_ids=torch.randint(1, 300, (ROWS, TOKENS)), use_cache=False, **given)
            hidden.last_hidden_state.sum()
    finally:
        body.layers, body.config.num_hidden_layers = blocks, len(blocks)
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_keeps_the_bytes_that_are_counted(llama: Any, dtype: Format, masked: bool) -> None:
    block = kept(llama, dtype, masked, 2) - kept(llama, dtype, masked, 1)
    assert block == pytest.approx(tensors.block_activations(SHAPE, Pass(ROWS, TOKENS, masked), dtype), rel=0.03)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_block_with_adapters_keeps_the_bytes_that_are_counted(llama: Any, dtype: Format) -> None:
    config = AdapterConfig(rank=4)
    view = Backbone(copy.deepcopy(llama), dtype).add("one", config, seed=0).requires_grad_(True)
    # The first block's embeddings take no gradient here, so a block more is what is compared.
    block = kept(view, dtype, False, 2) - kept(view, dtype, False, 1)
    assert block == pytest.approx(tensors.block_activations(SHAPE, Pass(ROWS, TOKENS), dtype, config), rel=0.05)


def test_checkpointing_keeps_what_enters_each_block(llama: Any) -> None:
    both, one = (kept(llama, "float32", False, layers, checkpointing=True) for layers in (2, 1))
    assert both - one == 4 * ROWS * TOKENS * 64
    counted = tensors.activations(SHAPE, Pass(ROWS, TOKENS), "float32", checkpointing=True)
    assert both == pytest.approx(counted, rel=0.03)


def test_the_cache_of_keys_takes_the_bytes_that_are_counted() -> None:
    layers = [PreallocatedLayer(Window(slice(0, 5), 0, 0), 5, 30) for _ in range(2)]
    cache = Cache(layers=layers)
    for index in range(2):
        cache.update(torch.zeros(5, 2, 7, 16), torch.zeros(5, 2, 7, 16), index)
    held = sum(each.untyped_storage().nbytes() for layer in layers for each in (layer.keys, layer.values))
    assert held == tensors.cached_keys(SHAPE, 5, 30, "float32") == 2 * tensors.cached_keys(SHAPE, 5, 30, "bfloat16")


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
def test_moments_take_the_bytes_that_are_counted(llama: Any, optimizer: str) -> None:
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes", reason="8-bit moments need bitsandbytes")
    model = copy.deepcopy(llama)
    made = build_optimizer(model, OptimizerConfig(learning_rate=1e-3, optimizer=optimizer))  # type: ignore[arg-type]
    model(input_ids=torch.randint(1, 300, (1, 4)), use_cache=False).logits.sum().backward()
    made.step()
    held = sum(
        value.untyped_storage().nbytes()
        for state in made.state.values()
        for name, value in state.items()
        if isinstance(value, Tensor) and value.numel() > 1 and not name.startswith("qmap")
    )
    counted = models.whole(SHAPE, False, "float32", optimizer, models.Ranks(), False).moments
    if optimizer == "adamw_8bit":  # leaves matrices of fewer than 4,096 elements as they are: no real model has any
        small = sum(p.numel() for p in model.parameters() if p.ndim == 2 and p.numel() < 4096)
        assert small == 4 * 64 * 32
        counted += small * (models.MOMENTS["adamw"] - models.MOMENTS["adamw_8bit"])
    assert held == pytest.approx(counted, rel=1e-3)


@pytest.mark.parametrize(("dtype", "quantize"), [("float32", None), ("bfloat16", None), ("bfloat16", "4bit")])
def test_a_backbone_takes_the_bytes_that_are_counted(llama: Any, dtype: Format, quantize: str | None) -> None:
    if quantize:
        pytest.importorskip("bitsandbytes", reason="4 bits need bitsandbytes")
    held, seen = 0, set()
    for parameter in Backbone(copy.deepcopy(llama), dtype, quantize).model.parameters():
        state = getattr(parameter, "quant_state", None)
        pieces = [parameter.data] if state is None else [parameter.data, state.absmax, state.state2.absmax]
        for piece in pieces:
            where = piece.untyped_storage().data_ptr()
            held += 0 if where in seen else piece.untyped_storage().nbytes()
            seen.add(where)
    assert held == pytest.approx(models.backbone(SHAPE, dtype, quantize), rel=0.01)


def test_the_plans_copies_of_the_samplers_sizes_are_the_samplers() -> None:
    assert memory.WRITTEN_AT_ONCE == shares.AT_ONCE
    assert tensors.LOGITS_AT_ONCE == LOGITS_AT_ONCE and memory.PREFILL_PARTS == PREFILL_PARTS
    assert inspect.signature(generate_responses).parameters["batch_size"].default == tensors.SAMPLED_AT_ONCE
