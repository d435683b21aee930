"""Compute a stage in several processes, its ranks, which this process starts, follows and ends.

On several hosts, each host except the first starts its share of the ranks with this command (docs/guide/gpus.md):

    python -m tasks.rank_processes --ranks 16 --every-stage
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.observe import Observe
from components.distributed.hosts import these_hosts
from components.distributed.launching import Program, Stopped, join, launch
from components.training.stopping import Held, Interrupted, graceful
from tasks.stages import Stage

WITHIN = "components.training.stopping:graceful"
BETWEEN_SECONDS = 5.0
"""Seconds between two stages, so that the first host's agent has closed the store of the earlier one."""


def run(
    stage: Stage, job: Any, inputs: Mapping[str, Path], out: Path, observe: Observe, check: Callable[[], None]
) -> dict[str, float]:
    """Call the stage's function in `job.runtime.ranks` processes and return its metrics.

    Args:
        check: called repeatedly while the ranks compute; an error that it raises ends them.

    Raises:
        Interrupted: this process or a rank was told to stop; a checkpoint stays. Errors of `launch` are passed on.
    """
    program = Program(f"{stage.module}:run", stage.job, setup="components.models.runtime:activate", within=WITHIN)
    with Held() as signals:

        def stop_signal() -> int | None:
            check()
            return signals.told

        try:
            return launch(
                program, stage.name, job, inputs, out, observe, job.runtime.ranks, job.runtime.rank_timeout, stop_signal
            )
        except Stopped as stopped:
            signals.deliver()
            raise Interrupted(stopped.number) from None


def main(arguments: list[str] | None = None) -> int:
    """Compute this host's share of the stage that the first host computes, and return the exit code.

    With `--every-stage` also its share of all later stages, and of attempts after a stage broke down, until it is told
    to stop.
    """
    parser = argparse.ArgumentParser(prog="python -m tasks.rank_processes", description="Join the ranks of a stage.")
    parser.add_argument("--ranks", type=int, required=True, help="runtime.ranks of the run: of all hosts together")
    parser.add_argument("--timeout", type=float, default=1800.0, help="runtime.rank_timeout, in seconds")
    parser.add_argument("--every-stage", action="store_true", help="join one stage after the other until told to stop")
    options = parser.parse_args(arguments)
    try:
        if these_hosts().number == 0:
            raise UserError("TETHER_HOST is 0: the first host computes the stage itself (tether run, or a worker).")
        with graceful():
            code = _join_once(options.ranks, options.timeout)
            while options.every_stage:
                time.sleep(BETWEEN_SECONDS)
                code = _join_once(options.ranks, options.timeout)
            return code
    except UserError as error:
        print(f"tether: {error}", file=sys.stderr)
        return error.exit_code
    except Interrupted as stopped:
        return 128 + stopped.number


def _join_once(ranks: int, timeout: float) -> int:
    with tempfile.TemporaryDirectory(prefix="tether-ranks-") as folder, Held() as signals:
        return join(WITHIN, ranks, Path(folder), timeout, lambda: signals.told)


if __name__ == "__main__":
    sys.exit(main())
