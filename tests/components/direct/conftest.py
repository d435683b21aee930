"""A run of the direct stage on the tiny stages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.direct.config import DirectJob, PolicyConfig
from tests.components.conftest import GENERATION, RUNTIME, silent


def job_of(method: str = "dpo", *, ppo: dict[str, Any] | None = None, seed: int = 0, **options: Any) -> DirectJob:
    """A tiny job, with `options` of `policy` and `ppo` over its own."""
    tiny = {"learning_rate": 1e-3, "batch_size": 16, "micro_batch_size": 8, "checkpoint_every": 2, "evaluate_every": 3}
    measures = {"evaluate": 8, "watch": {"prompts": 8}, "repeats": {"prompts": 4, "samples": 2}} | (ppo or {})
    common = {"runtime": options.pop("runtime", RUNTIME), "generation": options.pop("generation", GENERATION)}
    return DirectJob(seed=seed, **common, policy=PolicyConfig(method=method, **tiny | options), ppo=measures)


Run = Callable[..., dict[str, float]]


@pytest.fixture
def direct(stages: Any) -> Run:
    """`direct(out, method, **options)` runs the stage; the artifact is `out/artifact`."""

    def run(out: Path, method: str = "dpo", observe: Any = silent, **options: Any) -> dict[str, float]:
        from components.direct import stage

        return stage.run(job_of(method, **options), stages.inputs_of("ppo"), out, observe)

    return run
