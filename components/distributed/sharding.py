"""Shard a model's parameters, gradients and moments over the ranks by FSDP2. With one process, models stay unchanged.

Each loss of a step is weighted by its share of the step's rows over all ranks, so gradients are summed, not averaged.
"""

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from components.distributed.ranks import size

P = ParamSpec("P")
T = TypeVar("T")

_SKELETON = "_tether_skeleton"


def spread(
    model: Any, sharding: str, device: str, dtype: str, prepare: Callable[[nn.Module], object] = lambda part: None
) -> Any:
    """Shard a model over the ranks as `Runtime.sharding` says, and return it; `gathered` makes it whole again.

    `zero2` shards gradients and optimiser moments, and keeps parameters whole from a step's first pass to its last.
    `zero3` gathers each block's parameters only for its own pass, and also shards a frozen model. `replicas` shards
    nothing. An adapter is small, so every rank has all of it. (Rajbhandari et al. 2020, "ZeRO", section 5.)

    With matrix products in bfloat16 the linear layers of a block that trains are gathered in bfloat16, to which
    `autocast` would round them. Everything else, such as norms, is gathered in float32, in which autocast uses it.

    Args:
        model: on the host, or on `device`. It moves to the device block by block, so that it is never whole there.
        prepare: changes a block, and at last the body of the model, before it is sharded and moved.
    """
    if getattr(model, "backbone", None) is not None or not hasattr(model, "save_pretrained"):
        return model
    trains = any(parameter.requires_grad for parameter in model.parameters())
    if size() == 1 or sharding == "replicas" or not (trains or sharding == "zero3"):
        prepare(model.base_model)
        return model.to(device)
    for buffer in model.buffers():
        buffer.data = buffer.to(device)
    unsharded = copy.deepcopy(model, _emptied(model))  # tied parameters stay tied
    mesh = _mesh(device, dist.group.WORLD)
    model.through = types.MethodType(lambda self, function, *args, **kwargs: function(self, *args, **kwargs), model)
    again, precision = sharding == "zero3", MixedPrecisionPolicy()
    if trains and dtype == "bfloat16":
        precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]:
        prepare(block)
        linear: list[nn.Module] = [m for m in block.modules() if isinstance(m, nn.Linear)]
        if linear and precision.param_dtype is not None:
            fully_shard(linear, mesh=mesh, reshard_after_forward=again, mp_policy=precision)
        fully_shard(block, mesh=mesh, reshard_after_forward=again)
    prepare(model.base_model)
    fully_shard(model, mesh=mesh, reshard_after_forward=not trains)
    for module in _sharded(model):
        module.set_force_sum_reduction_for_comms(True)  # else PREMUL_SUM, which gloo lacks
        module.set_gradient_divide_factor(1.0)
    register_fsdp_forward_method(model, "through")
    object.__setattr__(model, _SKELETON, (unsharded, again))
    return model


@functools.lru_cache(1)
def _mesh(device: str, group: Any) -> DeviceMesh:
    """Return the mesh of all ranks, which is made once for a process group."""
    return init_device_mesh(device, (size(),))


def _emptied(model: nn.Module) -> dict[int, nn.Parameter]:
    """Return a parameter without data for each of the model's parameters, by its id."""
    return {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()}


def _sharded(model: nn.Module) -> Iterator[Any]:
    yield from (module for module in model.modules() if isinstance(module, FSDPModule))


def is_sharded(model: Any) -> bool:
    """Return whether `spread` has sharded the model's parameters."""
    return isinstance(model, FSDPModule)


def is_spread(tensor: Tensor) -> bool:
    """Return whether this rank has only a part of `tensor`."""
    return isinstance(tensor, DTensor)


def passes_must_match(model: Any) -> bool:
    """Return whether passes gather parameters, so that all ranks must make the same number in the same order."""
    return is_sharded(model) and getattr(model, _SKELETON)[1]


def skeleton(model: Any) -> Any:
    """Return the whole model with parameters that have no data; an unsharded model is returned as it is."""
    return getattr(model, _SKELETON)[0].train(model.training) if is_sharded(model) else model


def gathered(model: Any) -> Any:
    """Return on every rank the whole model with the current weights; an unsharded model is returned as it is."""
    if not is_sharded(model):
        return model
    only_own_part(model)
    unsharded, whole_by_id = skeleton(model), dict[int, nn.Parameter]()
    for (_, empty), (_, parameter) in zip(unsharded.named_parameters(), model.named_parameters(), strict=True):
        whole_by_id[id(empty)] = nn.Parameter(whole(parameter).detach(), parameter.requires_grad)
    _replace(unsharded, whole_by_id)
    return unsharded


def release(model: Any) -> None:
    """Free the weights that `gathered` returned; the sharded model keeps its own."""
    if is_sharded(model):
        _replace(skeleton(model), _emptied(skeleton(model)))


def _replace(model: nn.Module, by_id: dict[int, nn.Parameter]) -> None:
    """Replace the parameters with these ids; tied ones stay tied."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = by_id.get(id(parameter), parameter)


def only_own_part(model: Any) -> None:
    """Free the gathered weights of a sharded model, so that its parameters are this rank's part and may be replaced.

    After a forward pass without a backward pass the weights stay gathered, maybe in bfloat16, and the next pass would
    use them.
    """
    for module in _sharded(model):
        module.reshard()


def through(model: Any, function: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call `function(model, *args)`, which may use any part of the model, as FSDP's forward pass if it is sharded."""
    return model.through(function, *args, **kwargs) if is_sharded(model) else function(model, *args, **kwargs)


def reduce_at(model: Any, last: bool) -> None:
    """Set whether the next backward pass is the last of a step, after which `zero2` reduces gradients.

    `zero3` reduces them after every backward pass, so that whole gradients of more than a block never exist.
    """
    if is_sharded(model):
        model.set_requires_gradient_sync(last or passes_must_match(model))
        model.set_reshard_after_backward(last or passes_must_match(model))


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor on every rank. Collective: all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, template: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, sharded like `template`; a part is returned as it is. Collective."""
    if not isinstance(template, DTensor) or isinstance(tensor, DTensor):
        return tensor
    return distribute_tensor(tensor.to(template.device), template.device_mesh, template.placements)


def own_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of this rank's part of a tensor."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.numel() * part.element_size()


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum over the ranks the gradients of unsharded parameters; FSDP has summed those of sharded ones."""
    if size() == 1:
        return
    waits = []
    for parameter in parameters:
        if not isinstance(parameter, DTensor):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            waits.append(dist.all_reduce(parameter.grad, async_op=True))
    for wait in waits:
        if wait is not None:
            wait.wait()


def clip_gradients(parameters: list[nn.Parameter], most: float) -> Tensor:
    """Sum gradients over the ranks, clip them by their global norm, and return the norm before clipping."""
    if size() == 1:
        return torch.nn.utils.clip_grad_norm_(parameters, most)
    sum_gradients(parameters)
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm
