"""What direct methods share: the observers of a training, and what it leaves."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from components.direct.config import DirectJob
from components.ppo.alarm_table import LOG_RATIO, WINDOW, chosen_alarm
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.control import KLLimits
from components.ppo.models import Models
from components.training.updates import History, Observer, RowTable, Update

logger = logging.getLogger(__name__)


@dataclass
class ChosenAlarm(RowTable[Update]):
    """Logs the alarm `chosen` once, and stops the training if `stops`. Its rows are the latest of the history that have
    `LOG_RATIO`, in which reports find the alarm again."""

    limit: float | None = field(kw_only=True)
    """As `DirectJob.chosen_limit`."""
    stops: bool = field(kw_only=True)
    raised: int = 0
    """The update that raised it; 0 for none."""
    memory = ("rows", "raised")

    def on_update(self, update: Update) -> Update:
        """Log the alarm if it is raised for the first time."""
        rows = [*self.rows, {"update": update.number, **update.metrics}]
        self.rows = [row for row in rows if LOG_RATIO in row][-WINDOW:]
        if self.raised or (alarm := chosen_alarm(self.rows, self.limit)) is None:
            return update
        self.raised = update.number
        logger.warning("update %d: %s", update.number, alarm["meaning"])
        return update.with_stop("policy.stop_on_alarm: the alarm chosen was raised") if self.stops else update


@dataclass
class ShownSamples(RowTable[Update]):
    """Keeps the responses that evaluations show, with the number of their step."""

    def on_update(self, update: Update) -> Update:
        """Add the responses of this step's evaluation."""
        self.rows += [{"update": update.number, **row} for row in update.examples]
        return update


@dataclass(frozen=True)
class DirectObservers:
    """The observers of a training."""

    evaluations: PolicyEvaluations
    history: History
    samples: ShownSamples
    in_order: dict[str, Observer[Any]]
    """All of them, and further ones, by name, in the order in which they are called."""

    @classmethod
    def start(
        cls, models: Models, job: DirectJob, data: Path, alarm_update: Callable[[], int] = int,
        **first: Observer[Update],
    ) -> "DirectObservers":  # fmt: skip
        """Return the observers before the first update; those of `first` are called before the others. `alarm_update`
        is as in `PolicyEvaluations`."""
        evaluations = PolicyEvaluations.start(models, job.measured, data, None, alarm_update, group="direct")
        history, samples = History(), ShownSamples()
        limits = KLLimits(job.measured.ppo, "direct/watched_")
        in_order = {**first, "evaluations": evaluations, "limits": limits, "samples": samples, "history": history}
        return cls(evaluations, history, samples, in_order)

    def count_from(self, before: int) -> None:
        """Number the updates of an ended training from `before` + 1: those of earlier rounds come first."""
        checkpoints = self.evaluations.checkpoints
        for row in (*self.samples.rows, *self.history.rows, *checkpoints.evaluations):
            row["update"] += before
        checkpoints.number += before if checkpoints.number else 0


class TrainedPolicy(NamedTuple):
    """What is known after a training."""

    observers: DirectObservers
    history: list[dict[str, Any]]
    """The metrics of each update."""
    metrics: dict[str, float]
