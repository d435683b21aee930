"""What direct methods share: the observers of a training, and what it leaves."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from components.direct.config import DirectJob
from components.ppo.best_policy import PolicyEvaluations
from components.ppo.control import KLLimits
from components.ppo.models import Models
from components.training.updates import History, Observer, RowTable, Update


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
    def start(cls, models: Models, job: DirectJob, data: Path, **first: Observer[Update]) -> "DirectObservers":
        """Return the observers before the first update; those of `first` are called before the others."""
        evaluations = PolicyEvaluations.start(models, job.measured, data, group="direct")
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
