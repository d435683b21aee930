"""Copies of a model's trained weights: whole on the first rank, and their exponential moving average in training."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from components.distributed import ranks, sharding
from components.models.folders import save_model
from components.training.updates import Observer, Update


def kept_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters for a checkpoint: those that train, or all if none does (as in a refreshed reference)."""
    sharding.only_own_part(module)
    named = list(module.named_parameters())
    return [(name, p) for name, p in named if p.requires_grad] or named


def whole_tensors(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return CPU copies on the first rank, and nothing on others; a tensor with two names (tied weights) has one copy.

    Sharded tensors are gathered one by one, so all ranks must call it.
    """
    by_name, copies = dict(named), dict[int, Tensor]()
    for tensor in {id(tensor): tensor for tensor in by_name.values()}.values():
        whole = sharding.whole(tensor).detach()
        if ranks.is_first():
            copies[id(tensor)] = whole.to("cpu", copy=True)
    return {name: copies[id(tensor)] for name, tensor in by_name.items() if copies}


def save_whole(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write `model` on the first rank, as `save_model` does. All ranks must call it: a sharded model is gathered on the
    first rank's CPU."""
    if sharding.is_sharded(model):
        weights = whole_tensors(model.state_dict(keep_vars=True).items())
        model = SimpleNamespace(save_pretrained=partial(model.save_pretrained, state_dict=weights))
    if ranks.is_first():
        save_model(model, tokenizer, folder)


def as_parts(weights: Mapping[str, Tensor], model: Any) -> Iterator[Tensor]:
    """Yield the first rank's `weights`, from `whole_tensors`, in the order of the `kept_parameters` of `model`: like
    these each is whole or this rank's part, and on its device. All ranks must call it."""
    sharding.only_own_part(model)
    for name, parameter in kept_parameters(model):
        whole = weights[name] if ranks.is_first() else torch.zeros(parameter.shape)
        yield sharding.like(ranks.joined(whole.to(parameter.device)), parameter)


@torch.no_grad()
def put_weights(model: Any, weights: Iterable[Tensor]) -> None:
    """Copy `weights` into the `kept_parameters` of `model`, in their order; sharded ones have this rank's part each."""
    sharding.only_own_part(model)
    for (_, parameter), weight in zip(kept_parameters(model), weights, strict=True):
        parameter.copy_(weight)


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
        put_weights(model, self.weights)

    @contextmanager
    def instead(self, model: Any) -> Iterator[None]:
        """Copy the average into `model` within the block, and restore its own weights afterwards."""
        weights = [weight.detach().clone() for weight in _trained(model)]
        self.replace(model)
        try:
            yield
        finally:
            put_weights(model, weights)


def _trained(model: Any) -> list[nn.Parameter]:
    sharding.only_own_part(model)
    return [p for p in model.parameters() if p.requires_grad]
