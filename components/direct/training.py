"""What every direct method does: train the policy by `fit`, with the observers of a policy, and keep what they saw."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.direct.config import DirectJob
from components.ppo.alarm_table import LOG_RATIO, WINDOW, chosen_alarm
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.control import KLLimits
from components.ppo.models import Models
from components.training.loop import TrainingExamples, fit
from components.training.updates import History, Observer, RowTable, Update

logger = logging.getLogger(__name__)


@dataclass
class ChosenAlarm(RowTable[Update]):
    """Logs the alarm `chosen` once, and stops the training if `stops`. Its rows are the latest of the history that have
    `LOG_RATIO`, in which reports find the alarm again: none of best of n."""

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
class TrainedPolicy:
    """What is known after a training."""

    evaluations: PolicyEvaluations
    history: History
    samples: ShownSamples
    metrics: dict[str, float]
    """What the method measured of its data."""

    def count_from(self, before: list[dict[str, Any]]) -> None:
        """Put the updates of earlier rounds first in the history, and number these after them."""
        checkpoints = self.evaluations.checkpoints
        for row in (*self.samples.rows, *self.history.rows, *checkpoints.evaluations):
            row["update"] += len(before)
        checkpoints.number += len(before) if checkpoints.number else 0
        self.history.rows[:0] = before


def train(
    models: Models, job: DirectJob, examples: TrainingExamples, inputs: Mapping[str, Path], out: Path,
    observe: Observe, metrics: dict[str, float], part: int | None = None, **first: Observer[Update],
) -> TrainedPolicy:  # fmt: skip
    """Train the policy on `examples`, without the frozen models that no step uses. Resumes from `out/checkpoint`.

    Args:
        metrics: what the method measured of its data.
        part: as in `fit`.
        first: observers that are called before the others, by name.
    """
    alarm = ChosenAlarm(limit=job.chosen_limit, stops=job.policy.stop_on_alarm)
    evaluations = PolicyEvaluations.start(
        models, job.measured, inputs["data"], alarm_update=lambda: alarm.raised * alarm.stops, group="direct"
    )
    trained = TrainedPolicy(evaluations, History(), ShownSamples(), metrics)
    observers: dict[str, Observer[Any]] = {
        **first, "alarm": alarm, "evaluations": evaluations, "limits": KLLimits(job.measured.ppo, "direct/watched_"),
        "samples": trained.samples, "history": trained.history,
    }  # fmt: skip
    with models.without(job.policy.unused, job.measured, inputs):
        fit(models.policy, examples, job.policy, seed=job.seed, group="direct", out=out, observe=observe, part=part,
            observers=observers)  # fmt: skip
    return trained
