"""Held-out evaluation during a training: keep the best checkpoint, choose the one to publish, decide when to stop."""

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from components.base.errors import CheckFailed
from components.distributed import ranks, sharding
from components.stats.intervals import LEVEL, Interval, clustered_mean, clustered_ratio
from components.training.optim import FitConfig
from components.training.trained_weights import as_parts, kept_parameters, put_weights, whole_tensors
from components.training.updates import Observer, Stateful, Update

Row = dict[str, float]
Values = dict[str, list[float]]


def any_row(row: Row) -> bool:
    """Return True: every checkpoint may be the best."""
    return True


@dataclass
class BestCheckpoint(Stateful):
    """The results of a training's evaluations, and the weights of the best checkpoint among them."""

    unit: str
    """The name of a checkpoint's number in its row: `update` or `step`."""
    is_better: Callable[[Row, Row], bool]
    """Returns whether the first row's checkpoint is better than the second row's."""
    is_eligible: Callable[[Row], bool] = any_row
    """Returns whether a row's checkpoint may be the best."""
    evaluations: list[Row] = field(default_factory=list)
    """A row of each evaluation, in order: the checkpoint's number (from 1) and its results."""
    number: int = 0
    """Number of the best checkpoint; 0 for none."""
    best_values: Values = field(default_factory=dict)
    """Results by example (N,), by name, of the best checkpoint."""
    last_values: Values = field(default_factory=dict)
    """The same of the last one."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """The trained parameters of the best checkpoint, whole and on the CPU; empty on all ranks but the first."""
    memory = ("evaluations", "number", "best_values", "last_values", "weights")

    def add(self, row: Row, values: Values, model: Any) -> None:
        """Add an evaluation of `model`, and keep a copy of its weights if it is the best. All ranks call it."""
        if self.is_eligible(row) and (not self.number or self.is_better(row, self.best)):
            self.number, self.best_values = int(row[self.unit]), values
            self.weights = whole_tensors(kept_parameters(model))
        self.evaluations.append(row)
        self.last_values = values

    def publish(self, model: Any, keep_last: Callable[[], None]) -> None:
        """Call `keep_last`, which stores `model`, and then load the best weights into it. All ranks call it."""
        if not sharding.is_sharded(model):
            keep_last()
            put_weights(model, as_parts(self.weights, model))
            return
        parts = list(as_parts(self.weights, model))  # on the devices, so that the host holds one whole model at a time
        self.weights = {}
        keep_last()
        put_weights(model, parts)

    def restore(self, state: Any) -> None:
        """Restore the state from a checkpoint; only the first rank keeps the weights."""
        super().restore(state)
        self.weights = self.weights if ranks.is_first() else {}

    @property
    def best(self) -> Row:
        """Return the row of the best checkpoint."""
        return next(row for row in self.evaluations if row[self.unit] == self.number)

    @property
    def last(self) -> Row:
        """Return the row of the last evaluation."""
        return self.evaluations[-1]

    @property
    def level(self) -> float:
        """Return the confidence level of one comparison that makes it 95 % for all evaluations together (Bonferroni).

        The best of many noisy means looks better than it is.
        """
        return 1 - (1 - LEVEL) / len(self.evaluations)

    def is_stale(self, patience: int | None) -> bool:
        """Return whether `patience` or more evaluations have come since the best one. Never if either is missing."""
        later = sum(row[self.unit] > self.number for row in self.evaluations)
        return patience is not None and self.number > 0 and later >= patience


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
    examples: Callable[[], list[dict[str, object]]] = list
    """Returns what the model makes of a few examples now, for people to read while it trains: rows of `prompt`,
    `response` and numbers."""


@dataclass
class LossEvaluations(Observer[Update]):
    """Held-out evaluations of a supervised training, each `evaluate_every` steps."""

    config: FitConfig
    group: str
    """`sft` or `reward`."""
    heldout: HeldOut
    published: dict[str, float] = field(default_factory=dict)
    """The final metrics; empty before `publish`."""
    memory = ("checkpoints",)

    def __post_init__(self) -> None:
        self.checkpoints = BestCheckpoint("step", lambda row, best: row["loss"] < best["loss"])

    def on_update(self, update: Update) -> Update:
        """Evaluate the model if it is time; the last step is evaluated only if an earlier one was.

        It uses no random numbers but those of `heldout.examples`, which has a seed of its own. All ranks call it.

        Raises:
            CheckFailed: a loss is not finite.
        """
        every, step = self.config.evaluate_every, update.number
        if every is None or (step % every and not (update.last and self.checkpoints.evaluations)):
            return update
        began, model = time.perf_counter(), update.model
        training = model.training
        model.eval()
        with torch.no_grad():
            losses, more = self.heldout.losses()
            examples = self.heldout.examples()
        losses = ranks.values_of_first(losses)  # GPUs may round differently, and all ranks must stop at the same step
        model.train(training)
        if not np.isfinite(losses).all():
            raise CheckFailed(
                f"{self.group}: the loss of a held-out example isn't finite after step {step}. Lower "
                f"{self.group}.learning_rate."
            )
        mean = clustered_ratio(losses, self.heldout.weights, self.heldout.prompts)
        results = mean.metrics("loss") | more
        self.checkpoints.add({"step": step, **results}, {"losses": losses}, model)
        update = update.with_metrics({f"{self.group}/watched_{name}": value for name, value in results.items()})
        update = update.with_examples(examples)
        if self.checkpoints.is_stale(self.config.watch.patience):
            update = update.with_stop("the held-out loss has not fallen for watch.patience evaluations", fails=False)
        return update.with_timings({f"{self.group}/watched_seconds": time.perf_counter() - began})

    def choose(self) -> tuple[int, str]:
        """Return the step to publish, and the reason as a sentence.

        It is the last step, unless an earlier one's loss is certainly lower: by an interval paired over the examples,
        at `BestCheckpoint.level`.
        """
        if not self.checkpoints.evaluations:
            return 0, "The last step is published: the training ended before its first evaluation."
        best, end = self.checkpoints.best, self.checkpoints.last
        first, last = int(best["step"]), int(end["step"])
        if first == last:
            return last, f"Step {last}, the last, is published: no evaluated checkpoint has a lower held-out loss."
        losses = self.checkpoints.last_values["losses"], self.checkpoints.best_values["losses"]
        excess = [of_last - of_best for of_last, of_best in zip(*losses, strict=True)]
        worse = _weighted(excess, self.heldout.weights, self.heldout.prompts, self.checkpoints.level)
        numbers = (
            f"on {len(self.heldout.weights)} examples that no gate judges, {best['loss']:.4g} {self.heldout.unit} "
            f"against {end['loss']:.4g}: {worse.value:.3g} [{worse.low:.3g}, {worse.high:.3g}] lower"
        )
        if worse.low > 0:
            return first, (
                f"Step {first} is published: its held-out loss is certainly lower than that of the last, step {last} "
                f"({numbers})."
            )
        return last, (
            f"Step {last}, the last, is published: no earlier one is certainly better (step {first} has the lowest "
            f"loss {numbers})."
        )

    def document(self) -> dict[str, Any]:
        """Return the published step, the reason, and every evaluation, for `metadata.json`."""
        step, reason = self.choose()
        rows = self.checkpoints.evaluations
        last = self.checkpoints.last["step"] if rows else None
        return {"published_step": step or None, "reason": reason, "last_step": last, "evaluations": rows}

    def publish(self, model: Any, keep_last: Callable[[], None] = lambda: None) -> dict[str, float]:
        """Load the weights of the step from `choose` into `model`; return the final metrics. All ranks call it.

        If that is not the last step, `keep_last` is called before, to store the model as the last step left it.
        `GROUP/last_watched_loss` is that of the last step, whichever is published; likewise for the further numbers.
        """
        if not self.checkpoints.evaluations:
            return {}
        step, last = self.choose()[0], self.checkpoints.last
        row = last
        if step != last["step"]:
            self.checkpoints.publish(model, keep_last)
            row = self.checkpoints.best
        self.checkpoints.weights = {}
        metrics = {"published_step": float(step), "last_step": float(last["step"])}
        for kind, results in (("watched", row), ("last_watched", last)):
            metrics |= {f"{kind}_{name}": value for name, value in results.items() if name != "step"}
        self.published = {f"{self.group}/{name}": value for name, value in metrics.items()}
        return self.published


def _weighted(values: ArrayLike, weights: ArrayLike, clusters: Iterable[Hashable], level: float) -> Interval:
    """As `clustered_ratio`, but at any confidence level."""
    y, x = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    ratio = y.sum() / x.sum()
    return clustered_mean(ratio + (y - ratio * x) / x.mean(), clusters, level)
