"""A stage computed in several processes, its ranks, which this one starts, follows and ends."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.base.observe import Observe
from components.distributed.launching import Program, Stopped, launch
from components.training.stopping import Held, Interrupted
from tasks.stages import Stage


def run(
    stage: Stage, job: Any, inputs: Mapping[str, Path], out: Path, observe: Observe, check: Callable[[], None]
) -> dict[str, float]:
    """Call the stage's function in `job.runtime.ranks` processes; returns its metrics.

    Args:
        check: called all the time; what it raises ends the ranks.

    Raises:
        Interrupted: this process or a rank was told to stop; a checkpoint stays. And what `launch` raises.
    """
    program = Program(
        run=f"{stage.module}:run",
        job=stage.job,
        setup="components.models.runtime:activate",
        within="components.training.stopping:graceful",
    )
    with Held() as held:

        def told() -> int | None:
            check()
            return held.told

        try:
            return launch(
                program, stage.name, job, inputs, out, observe, job.runtime.ranks, job.runtime.rank_timeout, told
            )
        except Stopped as stopped:
            held.deliver()
            raise Interrupted(stopped.number) from None
