"""What the tests of several ranks share: a toy stage and the real ones, started as a stage's process starts them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from components.distributed.launching import Program, launch
from components.models.runtime import Runtime, cpu_instruction_set
from components.training.optim import FitConfig
from tests.components.distributed.toy import ToyJob
from tests.waiting import PATIENCE

SETUP, WITHIN = "components.models.runtime:activate", "components.training.stopping:graceful"

FIT = FitConfig(learning_rate=0.1, epochs=4, batch_size=8, micro_batch_size=4, checkpoint_every=1)


class Launched(NamedTuple):
    """What a launch gave."""

    metrics: dict[str, float]
    points: list[tuple[int, dict[str, float], dict[str, Any]]]


def runtime_of(ranks: int, sharding: str = "zero2", dtype: str = "float32") -> Runtime:
    """Ranks of one thread each on this CPU."""
    wanted = Runtime(
        device="cpu", dtype=dtype, threads=1, instruction_set=cpu_instruction_set(), ranks=ranks, sharding=sharding
    )
    return wanted.resolve()


def start(
    module: str, job: Any, inputs: dict[str, Path], out: Path, timeout: float = PATIENCE * 120.0,
    check: Callable[[], int | None] = lambda: None,
) -> Launched:  # fmt: skip
    """Compute `module`'s stage on the job's ranks."""
    points: list[tuple[int, dict[str, float], dict[str, Any]]] = []

    def observe(step: int, metrics: Any, total: int | None = None, **progress: Any) -> None:
        points.append((step, metrics, {"total": total, **progress}))

    program = Program(f"{module}:run", f"{type(job).__module__}:{type(job).__name__}", SETUP, WITHIN)
    out.mkdir(parents=True, exist_ok=True)
    name = module.split(".")[-2]
    found = launch(program, name, job, inputs, out, observe, job.runtime.ranks, timeout, check)
    return Launched(found, points)


@pytest.fixture
def toy(tmp_path: Path) -> Callable[..., Launched]:
    """Computes the toy stage on two ranks in `tmp_path`/out."""

    def computed(
        ranks: int = 2, timeout: float = PATIENCE * 60.0, check: Any = lambda: None, **options: Any
    ) -> Launched:
        job = ToyJob(**{"runtime": runtime_of(ranks), "fit": FIT} | options)
        return start("tests.components.distributed.toy", job, {}, tmp_path / "out", timeout, check)

    return computed
