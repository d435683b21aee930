"""Float32 matrix products on a CPU by oneDNN, the faster of torch's libraries on non-Intel processors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x weightᵀ + bias (..., O) of float32 `x` (..., I) and `weight` (O, I), any strides, on the CPU by oneDNN.

    torch's compiler calls the same function for a linear layer. `functional.linear` calls MKL in float32, which on
    non-Intel processors uses kernels for half the width of their registers.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if of_x else None,
            product(rows.t(), x.flatten(0, -2).t()) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class OneDnnLinear(nn.Linear):
    """A linear layer whose float32 products on the CPU use oneDNN. Others, and those under autocast, use torch's path.

    Without autocast the weight is read in the input's format: ranks gather bfloat16, and checks compute in float32.
    """

    packed: Tensor | None = None
    """The weight in oneDNN's blocked layout, which is fastest for a few rows; set within `packed_weights`."""

    def forward(self, input: Tensor) -> Tensor:
        if self.packed is not None and not torch.is_grad_enabled():
            return product(input, self.packed, self.bias)
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
            weight, bias = weight.to(input.dtype), None if bias is None else bias.to(input.dtype)
        if input.dtype != torch.float32 or input.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
            return functional.linear(input, weight, bias)
        return _Product.apply(input, weight, bias)


def by_onednn(model: Any) -> Any:
    """Make the model's linear layers `OneDnnLinear`; return it. Weights, names and files do not change."""
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.__class__ = OneDnnLinear
    return model


@contextmanager
def packed_weights(model: nn.Module, rows: int) -> Iterator[None]:
    """Let the model's `OneDnnLinear` layers read packed copies of their weights, made for `rows` rows, on the CPU.

    The time of a token of a few rows is the time to read the weights. The weights must not change within the block.
    Computations with gradients use the ordinary weights.
    """
    layers = [m for m in model.modules() if isinstance(m, OneDnnLinear) and _packs(m.weight)]
    try:
        for layer in layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
        yield
    finally:
        for layer in layers:
            layer.packed = None


def _packs(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies in the weight's format on this processor."""
    fits = weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.device.type == "cpu" and fits
