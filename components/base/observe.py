"""The callback by which a stage reports metrics and progress."""

from collections.abc import Mapping, Sequence
from typing import Protocol


class Observe(Protocol):
    """Receives a stage's metrics and progress after a step.

    `metrics` become the stage's curves. The rest is for the display of progress alone: `total` is the number of steps,
    `tokens` how many this step computed, and `resumed` says that no step was done now: the stage continues from `step`.
    `samples` are some responses of now, as JSON objects with `prompt` and `response`, for people to read.
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
    ) -> None: ...
