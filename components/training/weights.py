"""Copies of a model's trained weights, whole and on the CPU."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from components.distributed import sharding


def kept_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters for a checkpoint: those that train, or all if none does (as in a refreshed reference)."""
    named = list(module.named_parameters())
    return [(name, p) for name, p in named if p.requires_grad] or named


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return CPU copies; sharded tensors are gathered, so all ranks must call it."""
    return {name: sharding.whole(tensor).detach().cpu().clone() for name, tensor in named}


def put_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Load `weights`, from `whole_tensors`, into `model`, which is whole on this rank."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            named[name].copy_(tensor)
