"""Weights of a model that are kept beside it: those that train, whole and on the CPU."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from components.distributed import sharding


def kept_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters a checkpoint holds: those that train, or all where none does (a reference that is refreshed)."""
    named = list(module.named_parameters())
    return [(name, p) for name, p in named if p.requires_grad] or named


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies on the CPU, whole where the ranks share a tensor out. All ranks call it."""
    return {name: sharding.whole(tensor).detach().cpu().clone() for name, tensor in named}


def put_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Give `model`, whole on this rank, the parameters `weights`, as `whole_tensors` returned them."""
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            named[name].copy_(tensor)
