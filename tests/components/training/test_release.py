"""Where a stage's training ends, its memory goes back to the system, before the model is saved and samples."""

import importlib
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from components.reward.scoring import member_folder

RELEASES = {"sft": "components.sft.stage", "reward": "components.reward.train", "ppo": "components.ppo.stage"}


@pytest.mark.parametrize(
    ("stage", "options"), [("sft", {}), ("reward", {"members": 2}), ("reward", {"lora": {"rank": 2}}), ("ppo", {})]
)
def test_optimisers_and_their_moments_are_freed_before_memory_is_released_and_the_model_is_saved(
    stages: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, options: dict[str, Any]
) -> None:
    held, saved = list[weakref.ref[Any]](), list[bool]()

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        held.extend(map(weakref.ref, [optimizer, *moments]))

    def released(device: str) -> None:
        assert device == "cpu" and held
        assert [ref() for ref in held if ref() is not None] == []
        saved.append((member_folder(tmp_path / "artifact", len(saved)) / "model").exists())
        held.clear()

    monkeypatch.setattr(importlib.import_module(RELEASES[stage]), "release_memory", released)
    hook = register_optimizer_step_post_hook(stepped)
    try:
        stages.run(stage, tmp_path, **options)
    finally:
        hook.remove()
    assert held == [] and saved == [False] * options.get("members", 1)
