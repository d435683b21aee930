"""Null is a learning rate that a run chooses by the model's size, says, and keeps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.torch import save_file

from components.base.errors import UserError
from components.models.config import ScratchModel
from components.models.folders import build_causal_lm
from components.models.weights import count_parameters
from flows.config.profiles import parse_override
from flows.config.run_config import RunConfig, load_config
from flows.data.default_rates import with_rates
from flows.data.pretrained import find_base

NULL = ("sft.learning_rate", "reward.learning_rate", "ppo.learning_rate", "ppo.critic.learning_rate")


def config_of(*changes: str) -> RunConfig:
    return load_config("tiny", [parse_override(text) for text in (*(f"{name}=null" for name in NULL), *changes)])


def rates(config: RunConfig) -> list[float | None]:
    ppo = config.ppo
    return [config.sft.learning_rate, config.reward.learning_rate, ppo.learning_rate, ppo.critic.learning_rate]


@pytest.fixture(scope="module")
def model() -> Any:
    class Tokenizer:
        pad_token_id, eos_token_id = 0, 1

        def __len__(self) -> int:
            return 700

    shape = ScratchModel(hidden_size=64, layers=2, heads=2, vocabulary=700)
    built = build_causal_lm(shape, Tokenizer(), 32, seed=0)
    assert shape.parameters == sum(p.numel() for p in built.parameters())
    return built


def test_a_models_parameters_are_counted_from_its_files_in_one_or_in_shards(model: Any, tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert count_parameters(tmp_path / "whole", "sft.base") == count_parameters(tmp_path / "shards", "x") == parameters
    (tmp_path / "one").mkdir()
    writer = GGUFWriter(tmp_path / "one" / "model.gguf", "llama")
    writer.add_tensor("a", np.zeros((30, 40), dtype=np.float16))
    writer.add_tensor("b", np.zeros(7, dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    lone = tmp_path / "one" / "model.gguf"
    assert count_parameters(tmp_path / "one", "sft.base") == count_parameters(lone, "sft.base") == 1207
    (tmp_path / "one" / "adapter_config.json").write_text("{}")  # beside a lone file it is no part of the model
    assert find_base(str(lone), tmp_path) == lone and count_parameters(lone, "sft.base") == 1207
    with pytest.raises(UserError, match="holds an adapter, and the model"):
        count_parameters(tmp_path / "one", "sft.base")
    (tmp_path / "text.gguf").write_text("no model")
    with pytest.raises(UserError, match=f"sft.base: {tmp_path / 'text.gguf'} is not a weights file"):
        count_parameters(tmp_path / "text.gguf", "sft.base")
    with pytest.raises(UserError, match=r"this is not a GGUF file\. Give the folder .* org/name@revision"):
        find_base(str(tmp_path / "one" / "adapter_config.json"), tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(UserError, match=r"sft\.base: .*model\.safetensors is not a weights file"):
        count_parameters(tmp_path / "broken", "sft.base")


def test_null_becomes_a_number_that_a_line_names_and_explicit_values_win(tmp_path: Path) -> None:
    config, notes = with_rates(config_of(), tmp_path)
    assert rates(config) == [1e-3, 5e-4, 3e-4, 1e-3]
    assert notes == [
        "chosen for a model of 43.9 thousand parameters: sft.learning_rate 0.001, reward.learning_rate 0.0005, "
        "ppo.learning_rate 0.0003, ppo.critic.learning_rate 0.001"
    ]
    assert with_rates(config, tmp_path) == (config, [])
    config, notes = with_rates(config_of("sft.learning_rate=0.07", "ppo.critic.learning_rate=0.05"), tmp_path)
    assert rates(config) == [0.07, 5e-4, 3e-4, 0.05] and "sft" not in notes[0] and "critic" not in notes[0]
    for name in ("tiny", "demo", "gpu"):
        assert with_rates(load_config(name), tmp_path) == (load_config(name), []), "no profile's run changes"


def test_the_method_counts_adapters_have_ten_times_the_rate_and_a_shared_head_the_policys(tmp_path: Path) -> None:
    config, _ = with_rates(config_of("reward.lora.rank=4"), tmp_path)
    assert rates(config) == [1e-3, 5e-3, 3e-4, 1e-3]
    config, _ = with_rates(config_of("reward.lora.rank=4", "ppo.lora.rank=4"), tmp_path)
    assert rates(config) == [1e-3, 5e-3, 3e-3, 1e-2]
    config, notes = with_rates(config_of("ppo.critic.kind=shared"), tmp_path)
    assert config.ppo.critic.learning_rate is None and "critic" not in notes[0]
    config, _ = with_rates(config_of("ppo.advantage=rloo", "ppo.group_size=4"), tmp_path)
    assert config.ppo.critic.learning_rate is None


def test_a_pretrained_models_own_size_decides(tmp_path: Path) -> None:
    import torch

    base = tmp_path / "base"
    base.mkdir()
    save_file({"a": torch.zeros(5000, 5000, dtype=torch.int8)}, base / "model.safetensors")
    config, notes = with_rates(config_of(f"sft.base={base}"), tmp_path)
    assert rates(config) == [1.6e-4, 8.1e-5, 2.1e-5, 1.2e-4] and "25 million" in notes[0]
    with pytest.raises(UserError, match=r"sft\.base = smollm2: it has not been fetched"):
        with_rates(config_of("sft.base=smollm2"), tmp_path)
    explicit = [f"{name}=0.001" for name in NULL]
    assert with_rates(config_of("sft.base=smollm2", *explicit), tmp_path)[1] == [], "nothing is looked for"
