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
from types import MappingProxyType
from typing import Any, Generic, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils import checkpoint as torch_checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from components.base.errors import CheckFailed, UserError
from components.base.observe import Observe
from components.distributed import ranks, sharding
from components.gates.self_checks import SelfChecks
from components.models.adapters import AdapterView
from components.models.batching import LengthBuckets, packed_runs
from components.models.runtime import peak_memory_gb
from components.training import checkpoint
from components.training.optim import (
    OptimizerConfig,
    PassesConfig,
    build_optimizer,
    learning_rate_at,
    set_learning_rate,
)
from components.training.shares import load_share, save_share
from components.training.trained_weights import kept_parameters
from components.training.training_checks import check_cleared, check_passes, write
from components.training.updates import Observer, Stateful, U, Update


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


def balanced_passes(groups: Mapping[str, Sequence[int]], size: int, step: int, seed: int, *what: object) -> list[int]:
    """Return the `size` items of step `step` (from 0), of which each of `groups` has as many as any other, or one more.

    The groups take turns, over all steps, in an order that `seed` draws once. Each gives its items in endless shuffled
    passes.
    """
    names, items = sorted(groups), dict[int, int]()
    seeded(seed, *what, "groups").shuffle(names)
    turns = range(step * size, (step + 1) * size)
    for place, name in enumerate(names):
        for turn in turns[(place - turns.start) % len(names) :: len(names)]:
            items[turn] = groups[name][shuffled_passes(len(groups[name]), 1, turn // len(names), seed, *what, name)[0]]
    return [items[turn] for turn in turns]


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
    whole_up_to: float = math.inf,
) -> None:
    """Checkpoint parameters, optimiser moments and `state`. All ranks call it, and rank 0 writes.

    Args:
        state: JSON, in which values may also be tensors that are whole and on the CPU.
        whole_up_to: GB of sharded tensors above which each rank writes its own part.
    """
    tensors = {f"{name}|{k}": p.detach() for name, module in modules.items() for k, p in kept_parameters(module)}
    document = _without_tensors(state, "state", tensors)
    groups = {}
    for name, optimizer in optimizers.items():
        moments, groups[name] = checkpoint.pack_optimizer(optimizer, f"{name}.optimizer")
        tensors |= moments
    spread = {name: tensor for name, tensor in tensors.items() if sharding.is_spread(tensor)}
    shares = None
    if spread and sum(x.numel() * x.element_size() for x in spread.values()) > whole_up_to * 1e9:
        digest = save_share(checkpoint.shares_folder(folder, step), spread)
        shares = checkpoint.Shares(list(spread), ranks.texts_of_all(digest))
        tensors = {name: tensor for name, tensor in tensors.items() if name not in spread}
    for name, tensor in tensors.items():
        whole = sharding.whole(tensor)  # one by one, so that only one is whole on a device
        tensors[name] = whole.cpu() if whole is not tensor and ranks.is_first() else tensor
    if ranks.is_first():
        checkpoint.save(folder, step, tensors, {"optimizers": groups, "state": document}, shares)


def restore_state(
    folder: Path, modules: Mapping[str, nn.Module], optimizers: Mapping[str, AdamW]
) -> tuple[int, Any] | None:
    """Load the newest checkpoint of `save_state`; return (step, state), or None if there is none."""
    saved = checkpoint.load_latest(folder)
    if saved is None:
        return None
    tensors = saved.tensors
    if saved.shares is not None:
        tensors = tensors | _load_shares(folder, saved, modules, optimizers)
    if {f"{name}|{key}" for name, module in modules.items() for key, _ in kept_parameters(module)} - tensors.keys():
        raise _refused(folder)
    with torch.no_grad():
        for name, module in modules.items():
            for key, parameter in kept_parameters(module):
                parameter.copy_(sharding.like(tensors[f"{name}|{key}"], parameter))
    for name, optimizer in optimizers.items():
        groups = saved.state["optimizers"][name]
        checkpoint.unpack_optimizer(optimizer, f"{name}.optimizer", tensors, groups)
    return saved.step, _with_tensors(saved.state["state"], saved.tensors)


def _refused(folder: Path) -> UserError:
    return UserError(
        f"the checkpoint in {folder} was written with other options or by another version of Tether, so the training "
        "can't continue from it. Remove that folder, and run again."
    )


TENSOR = "tensor|"
"""Prefix of the text that stands for a tensor in a checkpoint's JSON."""


def _without_tensors(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return `state` with a text in place of each tensor, and put the tensors into `tensors`."""
    if isinstance(state, Tensor):
        tensors[name] = state
        return f"{TENSOR}{name}"
    if isinstance(state, Mapping):
        return {key: _without_tensors(value, f"{name}|{key}", tensors) for key, value in state.items()}
    return state


def _with_tensors(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Undo `_without_tensors`."""
    if isinstance(state, dict):
        return {key: _with_tensors(value, tensors) for key, value in state.items()}
    is_tensor = isinstance(state, str) and state.startswith(TENSOR)
    return tensors[state.removeprefix(TENSOR)] if is_tensor else state


def _load_shares(
    folder: Path, saved: checkpoint.Checkpoint, modules: Mapping[str, nn.Module], optimizers: Mapping[str, AdamW]
) -> dict[str, Tensor]:
    """Return this rank's parts of the tensors that each rank wrote for itself; parameters are filled in place."""
    assert saved.shares is not None
    tensors = {f"{name}|{key}": p.detach() for name, module in modules.items() for key, p in kept_parameters(module)}
    for name, optimizer in optimizers.items():
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        for full_name in saved.shares.names:
            if full_name.startswith(f"{name}.optimizer."):
                index, _ = full_name.removeprefix(f"{name}.optimizer.").split(".")
                tensors[full_name] = torch.zeros_like(stepped[int(index)].detach())
    tensors = {name: tensors[name] for name in saved.shares.names}
    load_share(checkpoint.shares_folder(folder, saved.step), tensors)
    return tensors


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
    prepare: Callable[[list[int]], None] | None = None
    """Called with all indices of a step's batch, on every rank, before its calls of `loss`."""


class Loop(Generic[U]):
    """The updates of a training: what observers see of each, checkpoints and resuming, reports, and when it ends.

    Use it as a context manager around the updates.
    """

    def __init__(
        self, folder: Path, total: int, pace: checkpoint.Pace, observe: Observe, observers: Mapping[str, Observer[U]],
        models: Mapping[str, nn.Module], optimizers: Mapping[str, AdamW],
        controllers: Mapping[str, Stateful] | None = None, whole_up_to: float = math.inf,
    ) -> None:  # fmt: skip
        """Continue from the newest checkpoint in `folder`, if there is one.

        Args:
            total: number of updates, unless an observer stops the training.
            observers: by name, in the order in which they look at an update.
            models: what trains, by name; checkpoints also hold the observers' modules.
            controllers: further objects whose state checkpoints hold.
            whole_up_to: as for `save_state`.

        Raises:
            UserError: the checkpoint has other observers.
        """
        self._folder, self._total, self._pace, self._observe = folder, total, pace, observe
        self._observers, self._optimizers, self._whole_up_to = observers, optimizers, whole_up_to
        self._parts: dict[str, Stateful] = {**(controllers or {}), **observers}
        self._modules = dict(models)
        for observer in observers.values():
            self._modules |= observer.modules
        in_checkpoints = {id(parameter) for module in self._modules.values() for parameter in module.parameters()}
        for name, optimizer in optimizers.items():
            trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            numbers = f"checkpoints would not hold the {name}, which trains"
            SelfChecks().judge("training.resumed", trained <= in_checkpoints, numbers)
        self.number, self.ended = 0, total == 0
        """Number of updates made, and whether the training has ended."""
        if resumed := restore_state(folder, self._modules, optimizers):
            self.number, state = resumed
            if "parts" not in state or state["parts"].keys() != self._parts.keys():
                raise _refused(folder)
            self.ended = state["ended"] or self.number >= total
            for name, part in self._parts.items():
                part.restore(state["parts"][name])

    def __enter__(self) -> Self:
        self._pace.__enter__()
        for observer in self._observers.values():
            observer.on_start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._pace.__exit__(*exception)

    def __iter__(self) -> Iterator[int]:
        """Yield the number, from 1, of each update that is left to make."""
        while not self.ended:
            yield self.number + 1

    def report_resumed(self, rows: Sequence[Mapping[str, float]] = ()) -> None:
        """Report the metrics of the updates before the checkpoint, and that the training continues from it."""
        for row in rows:
            metrics = {name: value for name, value in row.items() if name != "update"}
            self._observe(int(row["update"]), metrics, total=self._total)
        if self.number:
            self._observe(self.number, {}, total=self._total, resumed=True)

    def run_observers(self, update: U) -> U:
        """Return the update as the observers return it, one after the other."""
        for observer in self._observers.values():
            update = observer.on_update(update)
        return update

    def finish(self, update: U) -> None:
        """Checkpoint if it is time, report the update, and stop if a signal came."""
        self.number, self.ended = update.number, update.last
        if self._pace.due(update.number, update.last):
            self.save()
        metrics, examples = {**update.metrics, **update.timings}, update.examples or None
        self._observe(update.number, metrics, total=self._total, tokens=update.tokens, samples=examples)
        self._pace.stop_if_told()

    @contextlib.contextmanager
    def saved_on(self, error: type[Exception]) -> Iterator[None]:
        """Checkpoint if the block, which changes no model, raises `error`, so that the training can resume there."""
        try:
            yield
        except error:
            if self.number:
                self.save()
            raise

    def save(self) -> None:
        """Checkpoint the training after its last update. All ranks call it."""
        state = {"ended": self.ended, "parts": {name: part.state() for name, part in self._parts.items()}}
        save_state(self._folder, self.number, self._modules, self._optimizers, state, self._whole_up_to)


def check_resumed(optimizers: Mapping[str, AdamW], steps: Mapping[str, int]) -> None:
    """Judge the state of optimisers that continue from a checkpoint, by the number of steps that each has made.

    Raises:
        CheckFailed: an optimiser counts other steps, or has lost its moments.
    """
    wrong = list[str]()
    for name, optimizer in optimizers.items():
        states = list(optimizer.state.values())
        counted = max((int(state.get("step", 0)) for state in states), default=0)
        if counted != steps[name]:
            wrong.append(f"the optimiser of the {name} counts {counted} steps, and its history has {steps[name]}")
        moments = [state["exp_avg_sq"] for state in states if "exp_avg_sq" in state]
        if counted and moments and not any(bool(moment.any()) for moment in moments):
            wrong.append(f"the second moments of the {name} are all 0 after {counted} steps")
    SelfChecks().judge("training.resumed", not wrong, "; ".join(wrong))


def fit(
    model: Any, examples: TrainingExamples, config: PassesConfig, *, seed: int, group: str, out: Path, observe: Observe,
    part: int | None = None, observers: Mapping[str, Observer[Update]] = MappingProxyType({}),
) -> int:  # fmt: skip
    """Train `model` in length-bucketed batches with weighted gradients; return the number of optimiser steps.

    Resumes from `out/checkpoint`.

    Args:
        group: metric group and checkpoint folder: `sft`, `reward` or `direct`.
        part: the model's number, if a stage trains several; each has its own data order and checkpoint folder.
        observers: look at each step, in this order, and may stop the training.

    Raises:
        CheckFailed: a loss or gradient is not finite, or a self-check does not hold.
    """
    sharding.only_own_part(model)
    name = group if part is None else f"{group}-{part}"
    each_pass = math.ceil(len(examples.lengths) / config.batch_size)
    steps = config.epochs * each_pass

    @functools.lru_cache(1)
    def batches(epoch: int) -> Sequence[list[int]]:
        return LengthBuckets(examples.lengths, config.batch_size, seeded(seed, name, "order", epoch))

    optimizer = build_optimizer(model, config)
    pace = checkpoint.Pace(config.checkpoint_every, config.checkpoint_minutes)
    loop = Loop(
        out / "checkpoint" / name, steps, pace, observe, observers, {"model": model}, {"model": optimizer},
        whole_up_to=config.checkpoint_whole,
    )  # fmt: skip
    loop.report_resumed()
    if loop.number:
        check_resumed({"model": optimizer}, {"model": loop.number})
    checks, taken = SelfChecks(), list[Sequence[int]]()
    with loop:
        for number in loop:
            step = number - 1
            rate = learning_rate_at(step, steps, config)
            set_learning_rate(optimizer, rate)
            draw = [ranks.rank()] if ranks.rank() else []
            torch.manual_seed(torch_seed(seed, name, "dropout", step, *draw))  # dropout uses the global generator
            batch = batches(step // each_pass)[step % each_pass]
            if examples.prepare is not None:
                examples.prepare(batch)
            check_cleared([model], checks)
            metrics, norm = _backward(model, examples, config, batch, group, number)
            metrics |= {f"{group}/grad_norm": norm, f"{group}/learning_rate": rate}
            step_and_clear(optimizer)
            check_passes(checks, taken, batch, number, each_pass, len(examples.lengths))
            timings = {f"{group}/peak_memory_gb": peak_memory_gb(next(model.parameters()).device.type)}
            tokens = sum(int(examples.lengths[i]) for i in batch)
            update = Update(number=number, total=steps, model=model, metrics=metrics, tokens=tokens, timings=timings)
            loop.finish(loop.run_observers(update))
    write(checks, out)
    return loop.number


def _backward(
    model: Any, examples: TrainingExamples, config: PassesConfig, batch: list[int], group: str, number: int
) -> tuple[dict[str, float], float]:
    """Accumulate and clip the gradient of the weighted mean loss of `batch`; return metrics and the norm before."""
    weight, shares = math.fsum(examples.weights[i] for i in batch), list[float]()
    unread: dict[str, list[Tensor]] = defaultdict(list)
    micros = micro_batches(batch, config.micro_batch_size, examples.lengths, examples.packing)
    for micro, counts in micros:
        shares.append(math.fsum(examples.weights[i] for i in micro) / weight if counts else 0.0)
        sharding.reduce_at(model, last=micro is micros[-1][0])
        with recomputed(model, config):
            loss, values = examples.loss(micro)
        (loss * shares[-1]).backward()
        for metric, value in ({"loss": loss} | values).items():
            unread[metric].append(value.detach())
    norm = clip_gradient(model, config.max_grad_norm)
    *numbers, norm_read = read([*chain.from_iterable(unread.values()), norm])  # one transfer per step
    columns = {name: [numbers.pop(0) for _ in values] for name, values in unread.items()}
    broken = next((loss for loss in columns.pop("loss") if not math.isfinite(loss)), None)
    if broken is not None:
        options = {"direct": "policy"}.get(group, group)
        raise CheckFailed(f"{group}: the loss is {broken} at step {number}. Lower {options}.learning_rate.")
    metrics = {name: sum(v * s for v, s in zip(values, shares, strict=True)) for name, values in columns.items()}
    return ranks.summed(metrics), check_norm(norm_read, group)


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
        rows = ranks.share(batch, of=rank)
        if packing is None:
            return [rows[start : start + size] for start in range(0, len(rows), size)]
        return [[rows[i] for i in run] for run in packed_runs([int(lengths[i]) for i in rows], packing)]

    runs_here, most = runs(ranks.rank()), max(len(runs(rank)) for rank in range(ranks.size()))
    return [(run, True) for run in runs_here] + [(list(batch[:1]), False) for _ in range(max(1, most) - len(runs_here))]


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
