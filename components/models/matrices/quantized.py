"""Store a frozen backbone's matrices in bfloat16, or in 4 bits by bitsandbytes (imported only where used)."""

import logging
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from components.base.errors import UserError
from components.models.matrices.kernels import OneDnnLinear

OPTION = "lora.quantize=4bit"

# peft imports bitsandbytes if it is installed; bitsandbytes then warns that a kernel it could download is missing.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def bitsandbytes(option: str) -> Any:
    """Import bitsandbytes for `option`, which an error names.

    Raises:
        UserError: it is not installed, or cannot be loaded here.
    """
    try:
        import bitsandbytes as library
    except Exception as error:  # a build for a different CUDA version raises RuntimeError
        raise UserError(
            f"{option} needs bitsandbytes, which cannot be imported here ({type(error).__name__}: {error}). Install it "
            "with pip install 'tether[bitsandbytes]', or leave the option out."
        ) from error
    return library


def _format(x: Tensor) -> torch.dtype:
    """Return the dtype of a product with `x`: autocast's if it is on, else that of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class Bfloat16Linear(OneDnnLinear):
    """A linear layer that stores its weight in bfloat16; products are in the dtype of x, or autocast's."""

    def forward(self, input: Tensor) -> Tensor:
        dtype = _format(input)
        bias = None if self.bias is None else self.bias.to(dtype)
        return functional.linear(input.to(dtype), self.weight.to(dtype), bias)


@cache
def _four_bit_class() -> type[nn.Linear]:
    library = bitsandbytes(OPTION)

    class FourBitLinear(library.nn.Linear4bit):  # type: ignore[name-defined]
        """A linear layer that stores its weight in 4 bits; products are in the dtype of x, or autocast's.

        bitsandbytes' own layer casts the result back to x's dtype, which under autocast doubles the memory kept for the
        gradient. In eval mode on a CPU it also rearranges the weight in place for a kernel that training cannot use.
        """

        def forward(self, x: Tensor) -> Tensor:
            x = x.to(_format(x))
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return library.matmul_4bit(x, self.weight, quant_state=self.weight.quant_state, bias=bias)

    return FourBitLinear


def four_bit(layer: nn.Linear) -> nn.Linear:
    """Return a frozen linear layer that stores the weight of `layer` in NF4 with quantised scales, on the same device.

    Dettmers et al. 2023, "QLoRA", section 3: blocks of 64 weights, scales in 8 bits.

    Raises:
        UserError: bitsandbytes is not installed, or does not support 4-bit matrices on the device.
    """
    library, device = bitsandbytes(OPTION), layer.weight.device
    linear: Any = _four_bit_class()(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    parameter = library.nn.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4", module=linear)
    try:
        linear.weight = parameter.to(device)  # this quantises, also on a CPU
        library.functional.dequantize_4bit(linear.weight.data, linear.weight.quant_state)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        raise UserError(
            f"{OPTION}: bitsandbytes {library.__version__} has no 4-bit matrices on {device.type} here "
            f"({type(error).__name__}: {error}). Leave the option out, or use a device that it supports."
        ) from error
    linear.bias = layer.bias
    return linear.requires_grad_(False)


def is_four_bit(module: nn.Module) -> bool:
    """Return whether the module, or a linear layer in it, stores its weight in 4 bits."""
    return any(hasattr(getattr(child, "weight", None), "quant_state") for child in module.modules())


def hold(model: Any, dtype: torch.dtype, quantize: str | None, device: str | None = None) -> None:
    """Convert the linear layers of a frozen model, below its head, to 4 bits if `quantize` says so, else to `dtype`.

    The model is moved to `device` layer by layer, so that at most one layer is there in float32.

    Raises:
        UserError: as for `four_bit`.
    """
    below = model.base_model
    for path, layer in [item for item in below.named_modules() if isinstance(item[1], nn.Linear)]:
        if quantize is not None:
            below.set_submodule(path, four_bit(layer if device is None else layer.to(device)))
        elif dtype == torch.bfloat16:
            layer.weight.data = layer.weight.data.to(dtype)
            layer.__class__ = Bfloat16Linear
    if device is not None:
        model.to(device)


def in_float32(layer: nn.Module) -> nn.Module:
    """Return a float32 layer with the weight with which `layer` computes; `layer` itself if it is in float32."""
    if isinstance(layer, Bfloat16Linear):
        layer.weight.data = layer.weight.data.float()
        layer.__class__ = OneDnnLinear  # type: ignore[assignment]
    elif is_four_bit(layer):
        functions, stored, bias = bitsandbytes(OPTION).functional, cast(Any, layer.weight), cast(Any, layer.bias)
        weight = functions.dequantize_4bit(stored.data, stored.quant_state).float()
        plain = OneDnnLinear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(weight, requires_grad=False), bias
        return plain
    return layer
