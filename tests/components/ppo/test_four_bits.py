"""Reward model and PPO on one backbone of 4 bits, with moments of 8: through the stages themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch

from components.models.adapters import Backbone, load_adapter
from components.models.folders import load_causal_lm
from components.models.logprobs import token_stats
from components.models.runtime import Runtime
from components.ppo.models import Models

LORA = {"lora": {"rank": 4, "quantize": "4bit"}, "learning_rate": 1e-2, "optimizer": "adamw_8bit"}


def test_both_stages_train_on_it_and_what_is_published_is_a_whole_float32_model_that_computes_the_same(
    stages: Any, runtime: Runtime, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="4 bits need bitsandbytes")
    found = stages.run("reward", tmp_path / "reward", **LORA)
    assert found["reward/invariance"] < 1e-4
    adapted = type(stages)(stages.inputs | {"reward": tmp_path / "reward" / "artifact"})
    options = LORA | {"updates": 2}
    found = adapted.run("ppo", tmp_path / "ppo", **options)
    assert found["ppo/updates"] == 2

    artifact = tmp_path / "ppo" / "artifact"
    published = load_causal_lm(artifact, runtime)[0]
    assert {p.dtype for p in published.parameters()} == {torch.float32}
    backbone = Backbone(load_causal_lm(stages.inputs["sft"], runtime)[0], "float32", "4bit")
    view = load_adapter(backbone, "policy", artifact / "adapter")
    models = Models.load(adapted.job("ppo", **options), adapted.inputs)
    assert models.reward_model.backbone is models.policy.backbone
    ids = torch.arange(2, 22).reshape(2, 10)
    mask = torch.ones_like(ids, dtype=torch.bool)
    counts = mask.clone()
    counts[:, 0] = False
    with torch.no_grad():
        whole, adapter, sft = (
            token_stats(model, ids, mask, counts, runtime).logprobs for model in (published, view, models.reference)
        )
    assert torch.allclose(whole, adapter, atol=1e-4) and (adapter - sft).abs().max() > 1e-3
