"""An exponential moving average of a model's weights during training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from components.distributed.sharding import only_own_part


class WeightAverage(nn.Module):
    """The average θ̄ ← d θ̄ + (1 - d) θ of the trained parameters of `model`, initialised with their current values.

    Each tensor is whole or this rank's part, like the model's own. Checkpoints store it like a model.
    """

    def __init__(self, model: Any, decay: float) -> None:
        super().__init__()
        self.decay = decay
        held = (p.detach().clone() for p in _trained(model))
        self.weights = nn.ParameterList([nn.Parameter(each, requires_grad=False) for each in held])

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Update the average with the current weights of `model`."""
        for average, weight in zip(self.weights, _trained(model), strict=True):
            average.lerp_(weight.detach(), 1 - self.decay)

    @torch.no_grad()
    def replace(self, model: Any) -> None:
        """Copy the average into `model`."""
        _put(model, list(self.weights))

    @contextmanager
    def instead(self, model: Any) -> Iterator[None]:
        """Copy the average into `model` within the block, and restore its own weights afterwards."""
        own = [weight.detach().clone() for weight in _trained(model)]
        self.replace(model)
        try:
            yield
        finally:
            _put(model, own)


@torch.no_grad()
def _put(model: Any, weights: list[Any]) -> None:
    for weight, given in zip(_trained(model), weights, strict=True):
        weight.copy_(given)


def _trained(model: Any) -> list[nn.Parameter]:
    only_own_part(model)
    return [p for p in model.parameters() if p.requires_grad]
