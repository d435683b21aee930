from pathlib import Path
from typing import Any

import pytest

from components.data.config import DataConfig
from components.data.inputs import KINDS, of_kind
from components.models.config import GenerationConfig
from data_contracts.config import TokenizerConfig, ValidateJob
from data_contracts.validate import run


@pytest.fixture(scope="session")
def job() -> Any:
    """A job of the validate stage with these options of `data`, for texts of up to 64 and 64 tokens."""

    def job(seed: int = 0, **data: Any) -> ValidateJob:
        generation = GenerationConfig(max_prompt_tokens=64, max_new_tokens=64)
        tokenizer = TokenizerConfig(vocabulary=1000, max_demonstrations=None)
        return ValidateJob(seed=seed, generation=generation, data=DataConfig(**data), sft=tokenizer)

    return job


@pytest.fixture(scope="session")
def validate(job: Any) -> Any:
    """Run the validate stage into `out` on `inputs` (names to paths); returns its metrics."""

    def validate(out: Path, inputs: dict[str, Path] | None = None, seed: int = 0, **data: Any) -> dict[str, float]:
        named = {kind: [str(path) for path in of_kind(inputs or {}, kind).values()] for kind in KINDS}
        given = {kind: paths if len(paths) > 1 else paths[0] for kind, paths in named.items() if paths}
        return run(job(seed, **given, **data), inputs or {}, out, lambda step, metrics, total=None, **_: None)

    return validate
