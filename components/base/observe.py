"""The callback by which a stage reports metrics and progress."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Observe(Protocol):
    """Receives a stage's metrics and progress after a step.

    `metrics` become the stage's curves. The rest is for the display of progress alone: `total` is the number of steps,
    `tokens` how many this step computed, and `resumed` says that no step was done now: the stage continues from `step`.
    `samples` are some responses of now, as JSON objects with `prompt` and `response`, for people to read.

    `doing` says what the stage does now, beside its steps, for example "evaluating on 512 held-out prompts". It comes
    without metrics, and `step` and `total` then count that work alone: 0 and None if it has no count.
    """

    def __call__(
        self,
        step: int,
        metrics: Mapping[str, float],
        total: int | None = None,
        *,
        tokens: float | None = None,
        resumed: bool = False,
        samples: Sequence[Mapping[str, object]] | None = None,
        doing: str | None = None,
    ) -> None: ...


def unobserved(step: int, metrics: Mapping[str, float], total: int | None = None, **of_progress: object) -> None:
    """Ignore what a stage observes."""
