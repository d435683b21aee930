"""Copies of a model's trained weights: whole on the CPU, and their exponential moving average during training."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from components.distributed import sharding
from components.training.updates import Observer, Update


def kept_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters for a checkpoint: those that train, or all if none does (as in a refreshed reference)."""
    sharding.only_own_part(module)
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


class WeightAverage(Observer[Update]):
    """The average θ̄ ← d θ̄ + (1 - d) θ of the trained parameters of `model`, initialised with their current values.

    Each tensor is whole or this rank's part, like the model's own. Checkpoints store it like a model.
    """

    def __init__(self, model: Any, decay: float) -> None:
        self.decay = decay
        copies = (p.detach().clone() for p in _trained(model))
        self.weights = nn.ParameterList([nn.Parameter(copy, requires_grad=False) for copy in copies])
        self.modules = {"average": self.weights}

    @torch.no_grad()
    def on_update(self, update: Update) -> Update:
        """Update the average with the current weights of the model."""
        for average, weight in zip(self.weights, _trained(update.model), strict=True):
            average.lerp_(weight.detach(), 1 - self.decay)
        return update

    @torch.no_grad()
    def replace(self, model: Any) -> None:
        """Copy the average into `model`."""
        _put(model, list(self.weights))

    @contextmanager
    def instead(self, model: Any) -> Iterator[None]:
        """Copy the average into `model` within the block, and restore its own weights afterwards."""
        weights = [weight.detach().clone() for weight in _trained(model)]
        self.replace(model)
        try:
            yield
        finally:
            _put(model, weights)


@torch.no_grad()
def _put(model: Any, weights: list[Any]) -> None:
    for parameter, weight in zip(_trained(model), weights, strict=True):
        parameter.copy_(weight)


def _trained(model: Any) -> list[nn.Parameter]:
    sharding.only_own_part(model)
    return [p for p in model.parameters() if p.requires_grad]
