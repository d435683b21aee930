"""Models as PPO loads them, and a batch of responses sampled from them."""

from collections.abc import Callable
from typing import Any

import pytest

from components.data.tables.published import read_split
from components.models.batching import encode_prompt
from components.models.sampling import Samples, sample
from components.ppo.config import PpoJob
from components.ppo.models import Models


@pytest.fixture
def load(stages: Any) -> Callable[..., tuple[PpoJob, Models, Samples]]:
    """`load(**options)`: the job, fresh models and eight sampled responses; `of` other stages than the shared ones."""

    def make(of: Any = stages, **options: Any) -> tuple[PpoJob, Models, Samples]:
        job = of.job("ppo", **options)
        models = Models.load(job, of.inputs)
        rows = read_split(of.inputs["data"] / "prompts.train")[:8]
        prompts = [encode_prompt(models.tokenizer, r["prompt"], 64) for r in rows]
        return job, models, sample(models.policy, models.tokenizer, prompts, job.generation, 0)

    return make
