"""A stand-in server with the SFT policy behind it, and jobs that ask it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from components.models.folders import load_causal_lm
from components.models.runtime import Runtime
from components.rollouts import asking as asking_module
from components.rollouts import client
from components.rollouts.client import resolve_rollout
from components.rollouts.config import RolloutConfig
from tests.components.rollouts.standin import StandIn


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundredth of the waits between two requests."""
    for module in (client, asking_module):
        monkeypatch.setattr(module, "FIRST_WAIT", 0.01)


@pytest.fixture
def server(stages: Any, runtime: Runtime) -> Iterator[StandIn]:
    """Started with the SFT model, as `vllm serve` would be."""
    model, tokenizer = load_causal_lm(stages.inputs["sft"], runtime)
    with StandIn(model, tokenizer.eos_token_id) as standing:
        yield standing


@pytest.fixture
def asking() -> Callable[..., RolloutConfig]:
    """`asking(server, **options)`: a config that asks it, resolved."""

    def make(server: StandIn, **options: Any) -> RolloutConfig:
        given = {"engine": "vllm", "url": server.url, "timeout": 20.0, "concurrency": 4, "retries": 1}
        return resolve_rollout(RolloutConfig(**given | options))

    return make
