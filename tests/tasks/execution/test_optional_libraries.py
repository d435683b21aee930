"""What a stage's key holds of libraries that only some options use."""

import importlib.util

import pytest

from components.base.errors import UserError
from components.models.config import GenerationConfig
from components.models.runtime import Runtime
from components.reward.config import RewardConfig, RewardJob
from tasks.execution.keying import key_of
from tasks.stages import STAGES


def job(**options: object) -> RewardJob:
    runtime = Runtime(device="cpu", dtype="float32", threads=1, instruction_set="default")
    return RewardJob(seed=0, runtime=runtime, generation=GenerationConfig(), reward=RewardConfig(**options))  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"optimizer": "adamw_8bit"}, {"lora": {"quantize": "4bit"}}])
def test_bitsandbytes_version_is_in_the_key_where_an_option_uses_it_and_only_there(
    options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = key_of(STAGES["reward"], job(), {})
    assert "bitsandbytes" not in key_of(STAGES["reward"], job(), {})[1]["libraries"]
    if importlib.util.find_spec("bitsandbytes") is not None:
        key, parts = key_of(STAGES["reward"], job(**options), {})
        assert key != plain and parts["libraries"]["bitsandbytes"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"need bitsandbytes.*pip install 'tether\[bitsandbytes\]'"):
        key_of(STAGES["reward"], job(**options), {})
