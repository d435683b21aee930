"""Parameters that follow from a shape are those of transformers' models, and of peft's adapters."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from components.base.errors import UserError
from components.models.adapters import Backbone
from components.models.config import AdapterConfig, ScratchModel
from flows.planning.shape import KNOWN, ModelShape, read_shape

SIZES = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
TINY = ScratchModel(hidden_size=32, layers=2, heads=2)


def known_config(name: str) -> LlamaConfig:
    """transformers' config of a known shape, whose fields are those of its published config.json."""
    shape = KNOWN[name]
    return LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden_size, intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size, tie_word_embeddings=shape.tied,
    )  # fmt: skip


CONFIGS = {
    "tiny": LlamaConfig(
        vocab_size=TINY.vocabulary, hidden_size=32, intermediate_size=85, num_hidden_layers=2, num_attention_heads=2,
        tie_word_embeddings=True,
    ),
    "untied": LlamaConfig(**GROUPED, tie_word_embeddings=False),
    "biases": LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED),
    "qwen3": Qwen3Config(**GROUPED, head_dim=16),
    **{name: known_config(name) for name in KNOWN},
}  # fmt: skip


def counted(auto: Any, config: Any, **options: Any) -> int:
    """Parameters of transformers' model, tied ones once, made without numbers."""
    with torch.device("meta"):
        return sum(p.numel() for p in auto.from_config(config, **options).parameters())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shape_has_the_parameters_of_transformers_models(name: str) -> None:
    """Exactly, but for biases and for norms of queries and keys."""
    config = CONFIGS[name]
    shape = ModelShape.of_config(json.loads(config.to_json_string(use_diff=False)), name)
    left_out = 0.02 if name in ("biases", "qwen2", "qwen3") else 0  # of models this small
    assert shape.parameters == pytest.approx(counted(AutoModelForCausalLM, config), rel=left_out, abs=0)
    config.num_labels, config.pad_token_id = 1, 0
    counted_scalar = counted(AutoModelForSequenceClassification, config)
    assert shape.scalar_parameters == pytest.approx(counted_scalar, rel=left_out, abs=0)


def test_the_known_shapes_are_the_published_models() -> None:
    """SmolLM2-135M's and the Llamas' parameters, as their model cards count them."""
    assert {name: shape.parameters for name, shape in KNOWN.items()} == {
        "smollm2-135m": 134_515_008, "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248,
    }  # fmt: skip


def test_a_model_from_scratch_has_the_parameters_that_its_config_says() -> None:
    assert ModelShape.of_scratch(TINY).parameters == TINY.parameters == counted(AutoModelForCausalLM, CONFIGS["tiny"])


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")])
def test_an_adapter_has_exactly_the_parameters_of_pefts(targets: tuple[str, ...] | None) -> None:
    config, model = AdapterConfig(rank=3, targets=targets), AutoModelForCausalLM.from_config(CONFIGS["tiny"])
    view = Backbone(model.requires_grad_(False)).add("one", config, seed=0)
    shape = ModelShape.of_config(model.config.to_dict(), "language")
    assert shape.adapter_parameters(config) == sum(p.numel() for p in view.parameters())


def test_a_gguf_file_says_its_shape() -> None:
    folder = Path(__file__).resolve().parents[3] / ".tether" / "models" / "smollm2"
    if not folder.is_dir():
        pytest.skip("`tether fetch smollm2` makes the model that is read")
    (file,) = folder.glob("*.gguf")
    assert ModelShape.of_path(folder, "sft.base") == KNOWN["smollm2-135m"] == ModelShape.of_path(file, "sft.base")


def test_a_shape_on_the_command_line_is_read_and_mistakes_are_named(tmp_path: Path) -> None:
    assert read_shape("llama-3.1-8b") == KNOWN["llama-3.1-8b"]
    path = tmp_path / "config.json"
    path.write_text(CONFIGS["tiny"].to_json_string(use_diff=False))
    assert read_shape(str(tmp_path)) == read_shape(str(path)) == ModelShape.of_scratch(TINY)
    with pytest.raises(UserError, match=r"hidden_size=32,layers=2: no such model, folder or file.* vocab_size"):
        read_shape("hidden_size=32,layers=2")
    for text, message in {
        '{"model_type": "mamba"}': "model_type is 'mamba'; memory is computed for llama, mistral",
        '{"model_type": "llama"}': "has no 'num_attention_heads'",
        json.dumps({"model_type": "llama", "num_attention_heads": 2} | SIZES | {"hidden_size": "wide"}): "is wrong",
        "{": "cannot be read as JSON",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            read_shape(str(tmp_path))
