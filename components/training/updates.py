"""An update of a training as a value, and the observers that read it. The training loops name no observer."""

import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from torch import nn

from components.base.errors import UserError
from components.distributed import ranks
from components.keys.plugins import find_plugin
from components.models.runtime import peak_memory_gb
from components.training.optim import ObserverPlugin

logger = logging.getLogger(__name__)


class Stop(NamedTuple):
    """A request to end the training."""

    reason: str
    fails: bool
    """Whether the training has failed. One that ran out of patience has not."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """One update (an optimiser step, in supervised training). Observers return it with what they add."""

    number: int
    """From 1."""
    total: int
    """How many updates the training has at most."""
    model: Any
    """The trained model, after the update."""
    metrics: Mapping[str, float]
    tokens: float
    """How many tokens it computed."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Metrics that depend on the machine: reported, and never in an artifact."""
    examples: Sequence[Mapping[str, object]] = ()
    """Responses to show to people: rows of `prompt`, `response` and numbers."""
    stop: Stop | None = None
    """Whether and why the training should end."""
    stops_early: bool = True
    """Whether it then ends before the last update."""

    @property
    def last(self) -> bool:
        """Return whether the training ends after this update."""
        return self.number == self.total or (self.stops_early and self.stop is not None)

    def with_metrics(self, metrics: Mapping[str, float]) -> Self:
        """Return the update with further metrics."""
        return replace(self, metrics={**self.metrics, **metrics})

    def with_timings(self, timings: Mapping[str, float]) -> Self:
        """Return the update with further metrics that depend on the machine."""
        return replace(self, timings={**self.timings, **timings})

    def with_examples(self, rows: Sequence[Mapping[str, object]]) -> Self:
        """Return the update with further responses to show."""
        return replace(self, examples=[*self.examples, *rows])

    def with_stop(self, reason: str, fails: bool = True) -> Self:
        """Return the update as one after which the training should end. The first failure's reason stays."""
        is_first = self.stop is None or (fails and not self.stop.fails)
        return replace(self, stop=Stop(reason, fails)) if is_first else self


U = TypeVar("U", bound=Update)


class Stateful:
    """A part of a training whose state checkpoints hold."""

    memory: ClassVar[Sequence[str]] = ()
    """The attributes of which `state` consists."""

    def state(self) -> Any:
        """Return its state for a checkpoint: JSON, with tensors that are whole and on the CPU."""
        parts = {name: getattr(self, name) for name in self.memory}
        return {name: part.state() if isinstance(part, Stateful) else part for name, part in parts.items()}

    def restore(self, state: Any) -> None:
        """Restore the state from a checkpoint."""
        for name, value in state.items():
            if isinstance(part := getattr(self, name), Stateful):
                part.restore(value)
            else:
                setattr(self, name, value)


class Observer(Stateful, Generic[U]):
    """Reads each update, and may add to it or stop the training.

    Checkpoints store `modules` and the state. All ranks call it, unless it is a plug-in.
    """

    modules: Mapping[str, nn.Module] = MappingProxyType({})
    """Modules that checkpoints store and load in place, by name."""

    def on_start(self) -> None:
        """Called before the first update of this process."""

    def on_update(self, update: U) -> U:
        """Return the update with what this observer adds."""
        return update


@dataclass
class RowTable(Observer[U]):
    """Collects rows for a file of the artifact."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: ClassVar[Sequence[str]] = ("rows",)


@dataclass
class History(RowTable[Update]):
    """The metrics of each update, and whether the training has failed. It comes after all that add metrics or stop."""

    failed: bool = False
    """Whether an observer has stopped the training, or would have, for a failure."""
    memory = ("rows", "failed")

    def on_update(self, update: Update) -> Update:
        """Add a row of `update` (from 1) and its metrics."""
        self.rows.append({"update": update.number, **update.metrics})
        if update.stop is not None:
            if update.last or (update.stop.fails and not self.failed):
                logger.warning("update %d: %s", update.number, update.stop.reason)
            self.failed = self.failed or update.stop.fails
        return update


class Speed(Observer[Update]):
    """Measures the speed of an update without its held-out evaluation, from the end of the one before it."""

    def __init__(self, group: str, device: str, sequences: int) -> None:
        """
        Args:
            group: metric group.
            sequences: number of sequences of an update.
        """
        self._group, self._device, self._sequences, self._began = group, device, sequences, 0.0

    def on_start(self) -> None:
        """Start the clock."""
        self._began = time.perf_counter()

    def on_update(self, update: Update) -> Update:
        """Add sequences and tokens per second, and the peak of memory."""
        now = time.perf_counter()
        seconds = now - self._began - update.timings.get(f"{self._group}/watched_seconds", 0.0)
        self._began = now
        return update.with_timings({
            f"{self._group}/samples_per_second": self._sequences / seconds,
            f"{self._group}/tokens_per_second": update.tokens / seconds,
            f"{self._group}/peak_memory_gb": peak_memory_gb(self._device),
        })  # fmt: skip


class PluggedObserver(Observer[U]):
    """An observer from an installed distribution, which only the first rank calls: all ranks get what it adds."""

    def __init__(self, config: ObserverPlugin, where: str) -> None:
        """Import it and call its entry point, which takes no argument and returns the observer.

        Args:
            where: the option that names it, for errors.

        Raises:
            UserError: it is not installed, changed since the run began, or raises.
        """
        plugin = find_plugin("tether.observers", config.plugin, where, config.code)
        self._where = f"{where}: the plug-in {plugin.name} ({plugin.label})"
        make = plugin.load(where)
        self._observer = self._call(make) if ranks.is_first() else None

    def on_update(self, update: U) -> U:
        """Add the plug-in's new metrics, examples and stop."""
        text = ""
        if self._observer is not None:
            after = self._call(lambda: self._observer.on_update(update))
            if not isinstance(after, Update):
                raise UserError(
                    f"{self._where}: on_update returned {after!r:.80}, which is not an update. Return the update that "
                    "it gets, or what the update's methods with_metrics, with_examples and with_stop return."
                )
            metrics = {name: value for name, value in after.metrics.items() if name not in update.metrics}
            for name, value in metrics.items():
                if not re.fullmatch(r"\w+/[\w/]+", name, re.ASCII):
                    raise UserError(f"{self._where}: the metric {name!r:.80} must be called GROUP/NAME. Rename it.")
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if not is_number or not abs(value) <= sys.float_info.max:
                    raise UserError(f"{self._where}: the metric {name} is {value!r:.80}. Make it a finite number.")
            parts = metrics, list(after.examples[len(update.examples) :]), after.stop
            text = self._call(lambda: json.dumps(parts))
        metrics, examples, stop = json.loads(ranks.text_of_first(text))
        update = update.with_metrics(metrics).with_examples(examples)
        return update if stop is None else update.with_stop(*stop)

    def state(self) -> Any:
        """Return the plug-in's state, which must be JSON; None if it has no method `state`."""
        method = getattr(self._observer, "state", None)
        return None if method is None else json.loads(self._call(lambda: json.dumps(method())))

    def restore(self, state: Any) -> None:
        """Restore the plug-in's state."""
        if (method := getattr(self._observer, "restore", None)) is not None:
            self._call(lambda: method(state))

    def _call(self, call: Any) -> Any:
        try:
            return call()
        except (Exception, SystemExit) as error:
            raise UserError(
                f"{self._where} raises {type(error).__name__}: {error}. Correct it, or leave it out of that option."
            ) from error
