"""A stage that learns a line in a moment, on any number of ranks, and goes wrong where its job says so."""

import atexit
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from components.base.errors import CheckFailed, UserError
from components.base.observe import Observe
from components.base.settings import Settings
from components.models.runtime import Runtime
from components.training.optim import FitConfig


class ToyJob(Settings):
    """What a test wants of the stage."""

    runtime: Runtime
    fit: FitConfig
    goes_wrong: Literal[
        "", "check", "user", "bug", "memory", "kill", "stand still", "terminate", "disk", "abort at exit"
    ] = ""
    rank: int = 1
    at_step: int = 3
    seconds: float = 0.0
    """Each step takes at least so long."""
    alone: float = 0.0
    """Seconds that rank 0 takes after the others have ended."""
    shutdown_waits: bool = False
    """Ending the process group takes for ever, as with NCCL while a rank has failed and the others wait for it."""
    watched: bool = False
    """Held-out losses rise at once on rank 0 and fall on the others, as no two ranks' losses ever differ."""


def run(job: ToyJob, inputs: Mapping[str, Path], out: Path, observe: Observe) -> dict[str, float]:
    """Fit y = 2x on 32 examples; the weight goes to `out`/artifact/weight."""
    import torch

    from components.distributed import ranks
    from components.training.heldout import HeldOut, LossEvaluations
    from components.training.loop import TrainingExamples, fit

    if job.shutdown_waits:
        torch.distributed.destroy_process_group = lambda: time.sleep(3600)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    x = torch.linspace(-1, 1, 32).unsqueeze(1)
    passes = 0

    def loss(rows: list[int]) -> tuple[Any, dict[str, float]]:
        nonlocal passes
        passes += 1
        time.sleep(job.seconds)
        if passes == job.at_step and ranks.rank() == job.rank:
            _go_wrong(job.goes_wrong, out)
        found = ((model(x[rows]) - 2 * x[rows]) ** 2).mean()
        return found, {"toy/train_loss": found.detach()}

    def heldout() -> tuple[list[float], dict[str, float]]:
        return [passes * (-1.0 if ranks.rank() else 1.0)] * 2, {}

    examples = HeldOut(heldout, [1.0, 1.0], ["a", "b"], "squares")
    observers = {"evaluations": LossEvaluations(job.fit, "toy", examples)} if job.watched else {}
    data = TrainingExamples(loss, [1] * 32, [1.0] * 32)
    steps = fit(model, data, job.fit, seed=0, group="toy", out=out, observe=observe, observers=observers)
    ranks.go_on_alone()
    time.sleep(job.alone)
    (out / "artifact").mkdir(parents=True, exist_ok=True)
    (out / "artifact" / "weight").write_text(model.weight.item().hex())
    return {"toy/steps": float(steps), "toy/ranks_left": float(ranks.size())}


def _go_wrong(how: str, out: Path) -> None:
    if how and not (done := out.parent / "went-wrong").exists():  # the next attempt goes well
        done.touch()
        match how:
            case "check":
                raise CheckFailed("toy: the loss is nan. Lower toy.learning_rate.")
            case "user":
                raise UserError("pairs.jsonl, row 3: no prompt. Add one.")
            case "bug":
                raise ZeroDivisionError("nothing to divide by")
            case "memory":
                raise MemoryError("out of memory: 3 GiB asked for")
            case "disk":
                raise OSError(28, "No space left on device", "/full/disk")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stand still":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "terminate":
                os.kill(os.getpid(), signal.SIGTERM)
            case "abort at exit":
                atexit.register(os.abort)
