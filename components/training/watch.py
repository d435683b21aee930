"""Held-out evaluation during supervised training: choose the checkpoint to publish, and decide when to stop."""

import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from components.base.errors import CheckFailed
from components.distributed import ranks
from components.stats.intervals import LEVEL, Interval, clustered_mean, clustered_ratio
from components.training.optim import FitConfig
from components.training.weights import kept_parameters, put_weights, whole_tensors


@dataclass(frozen=True)
class HeldOut:
    """N examples, on which no gate judges, with the function that evaluates the model on them."""

    losses: Callable[[], tuple[list[float], dict[str, float]]]
    """Returns each example's current loss (N,), in nats times its weight, and further numbers by name."""
    weights: Sequence[float]
    """(N,) weight of each example: the tokens of a response, or the weight of a pair."""
    prompts: Sequence[Hashable]
    """(N,) prompt of each example, by which intervals are clustered."""
    unit: str
    """Unit of the mean loss, as "nats a response token"."""
    shown: Callable[[], list[dict[str, object]]] = list
    """Returns what the model makes of a few examples now, for people to read while it trains: rows of `prompt`,
    `response` and numbers."""


@dataclass
class FitWatch:
    """The results of a training's held-out evaluations. Checkpoints contain all of it."""

    config: FitConfig
    group: str
    """`sft` or `reward`."""
    held: HeldOut
    looks: list[dict[str, float]] = field(default_factory=list)
    """For each evaluation `step` (from 1), `loss` with `_low` and `_high`, and further numbers."""
    losses: dict[int, list[float]] = field(default_factory=dict)
    """Maps a step to each example's loss, for the best evaluation and for the last one."""
    best: int = 0
    """The step with the lowest loss; 0 for none."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The model's parameters at step `best`, complete and on the CPU."""
    published: dict[str, float] = field(default_factory=dict)
    """The final metrics; empty before `publish`."""
    stopped: bool = False
    """Whether `watch.patience` is used up, so that no further step is made."""
    samples: list[dict[str, object]] = field(default_factory=list)
    """What `held.shown` returned at the newest evaluation of this process."""

    def state(self) -> dict[str, Any]:
        """Return the JSON part of its state for a checkpoint; the tensors are `weights`."""
        losses = {str(step): each for step, each in self.losses.items()}
        return {"looks": self.looks, "losses": losses, "best": self.best, "stopped": self.stopped}

    def restore(self, state: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        """Restore the state from a checkpoint."""
        self.looks, self.best, self.stopped = state["looks"], state["best"], state["stopped"]
        self.losses = {int(step): each for step, each in state["losses"].items()}
        self.weights = dict(weights)

    def due(self, step: int, last: bool) -> bool:
        """Return whether to evaluate after `step` steps; the last step only if there was an earlier evaluation."""
        every = self.config.evaluate_every
        return every is not None and (step % every == 0 or (last and bool(self.looks)))

    def look(self, model: Any, step: int) -> dict[str, float]:
        """Evaluate `model` after `step` steps, keep its weights if it is the best so far, and return metrics.

        It uses no random numbers but those of `held.shown`, which has a seed of its own. All ranks call it.

        Raises:
            CheckFailed: a loss is not finite.
        """
        began, training = time.perf_counter(), model.training
        model.eval()
        with torch.no_grad():
            losses, more = self.held.losses()
            self.samples = self.held.shown()
        losses = ranks.of_first(losses)  # GPUs may round differently, and all ranks must stop at the same step
        model.train(training)
        if not np.isfinite(losses).all():
            raise CheckFailed(
                f"{self.group}: the loss of a held-out example isn't finite after step {step}. Lower "
                f"{self.group}.learning_rate."
            )
        found = {"step": step, **clustered_ratio(losses, self.held.weights, self.held.prompts).metrics("loss"), **more}
        if not self.best or found["loss"] < self._at(self.best)["loss"]:
            self.best, self.weights = step, whole_tensors(kept_parameters(model))
        self.looks.append(found)
        self.losses = {at: each for at, each in self.losses.items() if at == self.best} | {step: losses}
        patience = self.config.watch.patience
        self.stopped = patience is not None and sum(each["step"] > self.best for each in self.looks) >= patience
        metrics = {f"{self.group}/watched_{name}": value for name, value in found.items() if name != "step"}
        return metrics | {f"{self.group}/watched_seconds": time.perf_counter() - began}

    def choose(self) -> tuple[int, str]:
        """Return the step to publish, and the reason as a sentence.

        It is the last step, unless an earlier one's loss is certainly lower. "Certainly" means by an interval paired
        over the examples, at 95 % for all evaluations together (Bonferroni), since the lowest of many noisy losses
        looks lower than it is.
        """
        last = int(self.looks[-1]["step"]) if self.looks else 0
        if not self.looks:
            return 0, "The last step is published: the training ended before its first evaluation."
        if self.best == last:
            return last, f"Step {last}, the last, is published: no evaluated checkpoint has a lower held-out loss."
        best, end = self._at(self.best)["loss"], self.looks[-1]["loss"]
        excess = [mine - its for mine, its in zip(self.losses[last], self.losses[self.best], strict=True)]
        level = 1 - (1 - LEVEL) / len(self.looks)
        worse = _weighted(excess, self.held.weights, self.held.prompts, level)
        told = (
            f"on {len(self.held.weights)} examples that no gate judges, {best:.4g} {self.held.unit} against {end:.4g}: "
            f"{worse.value:.3g} [{worse.low:.3g}, {worse.high:.3g}] lower"
        )
        if worse.low > 0:
            return self.best, (
                f"Step {self.best} is published: its held-out loss is certainly lower than that of the last, step "
                f"{last} ({told})."
            )
        return last, (
            f"Step {last}, the last, is published: no earlier one is certainly better (step {self.best} has the lowest "
            f"loss {told})."
        )

    def document(self) -> dict[str, Any]:
        """Return the published step, the reason, and every evaluation, for `metadata.json`."""
        published, reason = self.choose()
        last = self.looks[-1]["step"] if self.looks else None
        return {"published_step": published or None, "reason": reason, "last_step": last, "evaluations": self.looks}

    def publish(self, model: Any, keep_last: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Load the weights of the step from `choose` into `model`, whole on this rank; return the final metrics.

        If that is not the last step, `keep_last` is called before, to store the model as the last step left it.
        `GROUP/last_watched_loss` is that of the last step, whichever is published; likewise for the further numbers.
        """
        if not self.looks:
            return {}
        published, _ = self.choose()
        if published != self.looks[-1]["step"]:
            keep_last()
            put_weights(model, self.weights)
        metrics = {"published_step": float(published), "last_step": float(self.looks[-1]["step"])}
        for kind, look in (("watched", self._at(published)), ("last_watched", self.looks[-1])):
            metrics |= {f"{kind}_{name}": value for name, value in look.items() if name != "step"}
        self.published = {f"{self.group}/{name}": value for name, value in metrics.items()}
        return self.published

    def _at(self, step: int) -> dict[str, float]:
        return next(look for look in self.looks if look["step"] == step)


def _weighted(values: ArrayLike, weights: ArrayLike, clusters: Iterable[Hashable], level: float) -> Interval:
    """As `clustered_ratio`, but at any confidence level."""
    y, x = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    ratio = y.sum() / x.sum()
    return clustered_mean(ratio + (y - ratio * x) / x.mean(), clusters, level)
