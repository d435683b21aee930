"""The supervised training loop of SFT and reward: schedule, clipping, checkpoints, exact resume."""

import contextlib
import functools
import math
import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils import checkpoint as torch_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from components.base.errors import CheckFailed
from components.base.observe import Observe
from components.distributed import ranks, sharding
from components.models.adapters import AdapterView
from components.models.batching import LengthBuckets, packed_runs
from components.models.runtime import peak_memory_gb
from components.training import checkpoint
from components.training.optim import FitConfig, OptimizerConfig, build_optimizer, learning_rate_at, set_learning_rate
from components.training.shares import load_share, save_share
from components.training.watch import FitWatch
from components.training.weights import kept_parameters

BESIDE = "beside"
"""Prefix of a checkpoint's tensors that belong to no module."""


def seeded(seed: int, *what: object) -> random.Random:
    """Return a separate random stream for each use `what`, so that resuming needs no generator's state."""
    return random.Random(f"{seed} {' '.join(map(str, what))}")


def torch_seed(seed: int, *what: object) -> int:
    """Return a separate integer seed for each use `what`."""
    return seeded(seed, *what).getrandbits(62)


def shuffled_passes(count: int, size: int, step: int, seed: int, *what: object) -> list[int]:
    """Return the indices of the `size` items, of `count`, of step `step` (from 0), from endless shuffled passes."""
    out: list[int] = []
    position = step * size
    while len(out) < size:
        order = _shuffled(count, seed, *what, position // count)
        taken = order[position % count :][: size - len(out)]
        out += taken
        position += len(taken)
    return out


@functools.lru_cache(2)
def _shuffled(count: int, seed: int, *what: object) -> "array[int]":
    order = array("q", range(count))
    seeded(seed, *what).shuffle(order)
    return order


def save_state(
    folder: Path,
    step: int,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, AdamW],
    state: object,
    beside: Mapping[str, Tensor] | None = None,
    whole_up_to: float = math.inf,
) -> None:
    """Checkpoint parameters, optimiser moments and `state` (JSON). All ranks call it, and rank 0 writes.

    Args:
        beside: further tensors, whole and on the CPU.
        whole_up_to: GB of sharded tensors above which each rank writes its own part.
    """
    for module in modules.values():
        sharding.only_own_part(module)
    tensors = {f"{name}|{k}": p.detach() for name, module in modules.items() for k, p in kept_parameters(module)}
    tensors |= {f"{BESIDE}|{name}": tensor for name, tensor in (beside or {}).items()}
    groups = {}
    for name, optimizer in optimizers.items():
        moments, groups[name] = checkpoint.pack_optimizer(optimizer, f"{name}.optimizer")
        tensors |= moments
    spread = {name: tensor for name, tensor in tensors.items() if sharding.is_spread(tensor)}
    shares = None
    if spread and sum(each.numel() * each.element_size() for each in spread.values()) > whole_up_to * 1e9:
        digest = save_share(checkpoint.shares_folder(folder, step), spread)
        shares = checkpoint.Shares(list(spread), ranks.told_by_all(digest))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in spread}
    for name, tensor in tensors.items():
        whole = sharding.whole(tensor)  # one by one, so that only one is whole on a device
        tensors[name] = whole.cpu() if whole is not tensor and ranks.is_first() else tensor
    if ranks.is_first():
        checkpoint.save(folder, step, tensors, {"optimizers": groups, "state": state}, shares)


def restore_state(
    folder: Path,
    modules: Mapping[str, nn.Module],
    optimizers: Mapping[str, AdamW],
    beside: dict[str, Tensor] | None = None,
) -> tuple[int, Any] | None:
    """Load the newest checkpoint of `save_state`; return (step, state), or None if there is none.

    Args:
        beside: filled with the further tensors.
    """
    found = checkpoint.load_latest(folder)
    if found is None:
        return None
    tensors = found.tensors
    if found.shares is not None:
        tensors = tensors | _load_shares(folder, found, modules, optimizers)
    with torch.no_grad():
        for name, module in modules.items():
            for key, parameter in kept_parameters(module):
                parameter.copy_(sharding.like(tensors[f"{name}|{key}"], parameter))
    for name, optimizer in optimizers.items():
        groups = found.state["optimizers"][name]
        checkpoint.unpack_optimizer(optimizer, f"{name}.optimizer", tensors, groups)
    if beside is not None:
        prefix = f"{BESIDE}|"
        beside |= {name.removeprefix(prefix): t for name, t in found.tensors.items() if name.startswith(prefix)}
    return found.step, found.state["state"]


def _load_shares(
    folder: Path, found: checkpoint.Checkpoint, modules: Mapping[str, nn.Module], optimizers: Mapping[str, AdamW]
) -> dict[str, Tensor]:
    """Return this rank's parts of the tensors that each rank wrote for itself; parameters are filled in place."""
    assert found.shares is not None
    held = {f"{name}|{key}": p.detach() for name, module in modules.items() for key, p in kept_parameters(module)}
    for name, optimizer in optimizers.items():
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for full_name in found.shares.names:
            if full_name.startswith(f"{name}.optimizer."):
                index, _ = full_name.removeprefix(f"{name}.optimizer.").split(".")
                held[full_name] = torch.zeros_like(stepped[int(index)].detach())
    held = {name: held[name] for name in found.shares.names}
    load_share(checkpoint.shares_folder(folder, found.step), held)
    return held


def clip_gradient(model: Any, max_norm: float) -> Tensor:
    """Sum the gradient over the ranks and clip it by global norm; return the norm before as a tensor on the device."""
    return sharding.clip_gradients([p for p in model.parameters() if p.requires_grad], max_norm)


def check_norm(norm: float, what: str) -> float:
    """Check a gradient's norm and return it.

    Raises:
        CheckFailed: it is not finite.
    """
    if not math.isfinite(norm):
        raise CheckFailed(f"{what}: the gradient's norm is {norm}. Lower the learning rate or look at the batch.")
    return norm


def step_and_clear(optimizer: Any) -> None:
    """Make an optimiser step, and clear the gradient."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def read(values: Sequence[Tensor]) -> list[float]:
    """Return the numbers in one-element tensors. The host waits for the GPU only once for all."""
    return torch.stack([value.detach().float().reshape(()) for value in values]).tolist() if values else []


@dataclass(frozen=True)
class TrainingExamples:
    """N training examples, identified by indices 0 to N-1."""

    loss: Callable[[list[int]], tuple[Tensor, dict[str, Tensor]]]
    """Takes indices; returns their mean loss and scalar metrics, each a mean weighted by `weights`."""
    lengths: Sequence[int] | NDArray[np.integer[Any]]
    """(N,) length of each example in tokens."""
    weights: Sequence[float] | NDArray[Any]
    """(N,) weight of each example."""
    packing: int | None = None
    """Most tokens per call of `loss`, if it packs its examples; None: `micro_batch_size` examples per call."""


def fit(
    model: Any,
    examples: TrainingExamples,
    config: FitConfig,
    *,
    seed: int,
    group: str,
    out: Path,
    observe: Observe,
    part: int | None = None,
    watch: FitWatch | None = None,
) -> int:
    """Train `model` in length-bucketed batches with weighted gradients; return the number of optimiser steps.

    Resumes from `out/checkpoint`.

    Args:
        group: metric group and checkpoint folder, `sft` or `reward`.
        part: the model's number, if a stage trains several; each has its own data order and checkpoint folder.
        watch: evaluates the model on held-out examples, and may stop the training.

    Raises:
        CheckFailed: a loss or gradient is not finite.
    """
    name = group if part is None else f"{group}-{part}"
    each_pass = math.ceil(len(examples.lengths) / config.batch_size)
    steps = config.epochs * each_pass

    @functools.lru_cache(1)
    def batches(epoch: int) -> Sequence[list[int]]:
        return LengthBuckets(examples.lengths, config.batch_size, seeded(seed, name, "order", epoch))

    optimizer = build_optimizer(model, config)
    folder = out / "checkpoint" / name

    def counted(batch: list[int]) -> float:
        return math.fsum(examples.weights[i] for i in batch)

    kept = dict[str, Tensor]()
    resumed = restore_state(folder, {"model": model}, {"model": optimizer}, kept)
    if resumed and watch is not None:
        watch.restore(resumed[1], kept)
    if resumed:
        observe(resumed[0], {}, total=steps, resumed=True)
    with checkpoint.Pace(config.checkpoint_every, config.checkpoint_minutes) as pace:
        for step in range(resumed[0] if resumed else 0, steps):
            if watch is not None and watch.stopped:
                break
            rate = learning_rate_at(step, steps, config)
            set_learning_rate(optimizer, rate)
            own = [ranks.rank()] if ranks.rank() else []
            torch.manual_seed(torch_seed(seed, name, "dropout", step, *own))  # dropout uses the global generator
            batch, shares = batches(step // each_pass)[step % each_pass], list[float]()
            unread: dict[str, list[Tensor]] = defaultdict(list)
            micros = micro_batches(batch, config.micro_batch_size, examples.lengths, examples.packing)
            for micro, counts in micros:
                shares.append(counted(micro) / counted(batch) if counts else 0.0)
                sharding.reduce_at(model, last=micro is micros[-1][0])
                with recomputed(model, config):
                    loss, values = examples.loss(micro)
                (loss * shares[-1]).backward()
                for metric, value in ({"loss": loss} | values).items():
                    unread[metric].append(value.detach())
            norm = clip_gradient(model, config.max_grad_norm)
            *numbers, norm_read = read([*chain.from_iterable(unread.values()), norm])  # one transfer per step
            found = {name: [numbers.pop(0) for _ in values] for name, values in unread.items()}
            broken = next((number for number in found.pop("loss") if not math.isfinite(number)), None)
            if broken is not None:
                raise CheckFailed(f"{group}: the loss is {broken} at step {step + 1}. Lower {group}.learning_rate.")
            metrics = {name: sum(v * s for v, s in zip(values, shares, strict=True)) for name, values in found.items()}
            metrics = ranks.summed(metrics)
            metrics[f"{group}/grad_norm"] = check_norm(norm_read, group)
            metrics[f"{group}/learning_rate"] = rate
            step_and_clear(optimizer)
            last, samples = step + 1 == steps, None
            if watch is not None and watch.due(step + 1, last):
                metrics |= watch.look(model, step + 1)
                samples = watch.samples
                last = last or watch.stopped
            if pace.due(step + 1, last):
                state, beside = ({}, None) if watch is None else (watch.state(), watch.weights)
                whole = config.checkpoint_whole
                save_state(folder, step + 1, {"model": model}, {"model": optimizer}, state, beside, whole)
            metrics[f"{group}/peak_memory_gb"] = peak_memory_gb(norm.device.type)
            tokens = sum(int(examples.lengths[i]) for i in batch)
            observe(step + 1, metrics, total=steps, tokens=tokens, samples=samples)
            pace.stop_if_told()
    return steps


def micro_batches(
    batch: Sequence[int], size: int, lengths: Sequence[int] | NDArray[np.integer[Any]] = (), packing: int | None = None
) -> list[tuple[list[int], bool]]:
    """Return this rank's share of `batch` in runs of at most `size`, and whether each run counts.

    Every rank makes the same number of passes: a rank with fewer repeats some rows, in runs that do not count.

    Args:
        lengths: lengths in tokens, by the indices in `batch`.
        packing: most tokens of a run, instead of `size`.
    """

    def runs(rank: int) -> list[list[int]]:
        own = ranks.share(batch, of=rank)
        if packing is None:
            return [own[start : start + size] for start in range(0, len(own), size)]
        return [[own[i] for i in run] for run in packed_runs([int(lengths[i]) for i in own], packing)]

    own, most = runs(ranks.rank()), max(len(runs(rank)) for rank in range(ranks.size()))
    return [(run, True) for run in own] + [(list(batch[:1]), False) for _ in range(max(1, most) - len(own))]


@contextlib.contextmanager
def recomputed(model: Any, config: OptimizerConfig) -> Iterator[None]:
    """Use gradient checkpointing (Chen et al. 2016) for forward passes of `model` in this block, if the config says so.

    A pass keeps only the input of each transformer block, and its backward pass, in this block or later, computes the
    rest again. Only the blocks' own flags are set: the modules inside, above all dropout, keep their mode.
    """
    body = model.backbone.model if isinstance(model, AdapterView) else model
    blocks = [m for m in body.modules() if isinstance(m, GradientCheckpointingLayer)]
    blocks = blocks if config.gradient_checkpointing and torch.is_grad_enabled() else []
    training = [block.training for block in blocks]
    for block in blocks:
        block.gradient_checkpointing, block.training = True, True
        block._gradient_checkpointing_func = functools.partial(torch_checkpoint.checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for block, before in zip(blocks, training, strict=True):
            block.gradient_checkpointing, block.training = False, before
