"""The supervised loop that SFT and reward training share: schedule, clipping, checkpoints, exact resume."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from components import checkpoint
from components.batching import length_buckets
from components.errors import CheckFailed
from components.models import recomputed
from components.optim import OptimizerConfig, build_optimizer, learning_rate_at, set_learning_rate


class Report(Protocol):
    """Takes metrics by step; `total` is the number of steps, for a progress bar."""

    def __call__(self, step: int, metrics: Mapping[str, float], total: int | None = None) -> None: ...


def seeded(seed: int, *what: object) -> random.Random:
    """A random stream of its own for each use, so that resuming needs no stream's state."""
    return random.Random(f"{seed} {' '.join(map(str, what))}")


def torch_seed(seed: int, *what: object) -> int:
    """An integer seed of its own for each use."""
    return seeded(seed, *what).getrandbits(62)


def _kept(module: Any) -> list[tuple[str, Any]]:
    """The parameters a checkpoint holds: those that train, or all where none does (a reference that is refreshed)."""
    named = list(module.named_parameters())
    return [(name, p) for name, p in named if p.requires_grad] or named


def save_state(folder: Path, step: int, modules: Mapping[str, Any], optimizers: Mapping[str, Any], state: Any) -> None:
    """Checkpoint the parameters of `modules`, optimiser moments and `state` (JSON)."""
    tensors: dict[str, Tensor] = {}
    rests = {}
    for name, module in modules.items():
        tensors |= {f"{name}|{k}": p for k, p in _kept(module)}
    for name, optimizer in optimizers.items():
        packed, rests[name] = checkpoint.pack_optimizer(optimizer, prefix=f"{name}.optimizer")
        tensors |= packed
    checkpoint.save(folder, step, tensors, {"optimizers": rests, "state": state})


def restore_state(folder: Path, modules: Mapping[str, Any], optimizers: Mapping[str, Any]) -> tuple[int, Any] | None:
    """Load what `save_state` wrote last; returns (step, state), or None where there is no checkpoint."""
    found = checkpoint.load_latest(folder)
    if found is None:
        return None
    with torch.no_grad():
        for name, module in modules.items():
            for key, parameter in _kept(module):
                parameter.copy_(found.tensors[f"{name}|{key}"])
    for name, optimizer in optimizers.items():
        checkpoint.unpack_optimizer(optimizer, found.tensors, found.state["optimizers"][name])
    return found.step, found.state["state"]


def clip_and_step(model: Any, optimizer: Any, max_norm: float, what: str) -> float:
    """Clip the gradient by global norm, step and clear it; returns the norm before clipping.

    Raises:
        CheckFailed: the gradient isn't finite (nothing is stepped).
    """
    norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], max_norm)
    if not torch.isfinite(norm):
        raise CheckFailed(
            f"{what}: the gradient's norm is {norm.item()}. Lower the learning rate or look at the batch."
        )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def fit(
    model: Any,
    batch_loss: Callable[[list[int]], tuple[Tensor, dict[str, float]]],
    lengths: Sequence[int],
    *,
    epochs: int,
    batch_size: int,
    micro_batch_size: int,
    optimizer_config: OptimizerConfig,
    seed: int,
    group: str,
    out: Path,
    checkpoint_every: int,
    checkpoint_minutes: float | None,
    report: Report,
    part: int | None = None,
    weights: Sequence[float] | None = None,
) -> int:
    """Train `model` on examples 0..N-1 in length-bucketed batches; resumes from `out/checkpoint`.

    Args:
        batch_loss: takes indices, returns their mean loss (scalar) and metrics to report, each a mean over `weights`.
        lengths: N example lengths in tokens.
        micro_batch_size: examples per forward; gradients accumulate to `batch_size`, weighted by `weights`.
        checkpoint_every, checkpoint_minutes: steps and minutes between checkpoints; whichever comes first.
        group: metric group and checkpoint folder, `sft` or `reward`.
        part: which model, of a stage that trains several: a data order and a checkpoint folder of its own.
        weights: how often each of the N examples counts; once if None.

    Returns:
        the number of optimiser steps.

    Raises:
        CheckFailed: a loss or gradient isn't finite.
    """
    name = group if part is None else f"{group}-{part}"
    batches = [b for e in range(epochs) for b in length_buckets(lengths, batch_size, seeded(seed, name, "order", e))]
    optimizer = build_optimizer(model, optimizer_config)
    folder = out / "checkpoint" / name

    def counted(batch: list[int]) -> float:
        return len(batch) if weights is None else math.fsum(weights[i] for i in batch)

    resumed = restore_state(folder, {"model": model}, {"model": optimizer})
    with checkpoint.Pace(checkpoint_every, checkpoint_minutes) as pace:
        for step in range(resumed[0] if resumed else 0, len(batches)):
            rate = learning_rate_at(step, len(batches), optimizer_config)
            set_learning_rate(optimizer, rate)
            torch.manual_seed(torch_seed(seed, name, "dropout", step))  # dropout takes no generator
            metrics: dict[str, float] = {}
            batch = batches[step]
            for start in range(0, len(batch), micro_batch_size):
                micro = batch[start : start + micro_batch_size]
                share = counted(micro) / counted(batch)
                with recomputed(model, optimizer_config):
                    loss, values = batch_loss(micro)
                if not torch.isfinite(loss):
                    raise CheckFailed(
                        f"{group}: the loss is {loss.item()} at step {step + 1}. Lower {group}.learning_rate."
                    )
                (loss * share).backward()
                for metric, value in values.items():
                    metrics[metric] = metrics.get(metric, 0.0) + value * share
            metrics[f"{group}/grad_norm"] = clip_and_step(model, optimizer, optimizer_config.max_grad_norm, group)
            metrics[f"{group}/learning_rate"] = rate
            if pace.due(step + 1, last=step + 1 == len(batches)):
                save_state(folder, step + 1, {"model": model}, {"model": optimizer}, {})
            report(step + 1, metrics, total=len(batches))
            pace.stop_if_told()
    return len(batches)
