"""Shapes of Llama-like models and the parameters that follow from them. Importable without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from components.base.errors import UserError
from components.base.settings import Settings
from components.models.config import AdapterConfig, ScratchModel

LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3")
"""Values of transformers' `model_type`. Qwen's biases and query norms, below 0.1 % of the parameters, are not
counted."""


class ModelShape(Settings):
    """A decoder of blocks of attention (grouped queries) and a gated MLP, with RMSNorm and rotary positions."""

    vocabulary: int = Field(ge=1)
    """Rows of the embedding, V."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream, D."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP, I."""
    layers: int = Field(ge=1)
    """Transformer blocks."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Heads of keys and values."""
    head_size: int = Field(ge=1)
    """Width of a head."""
    tied: bool = True
    """Whether the output layer is the embedding."""

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer of a block, by transformers' name."""
        width, inner = self.hidden_size, self.intermediate_size
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        return {
            "q_proj": (width, queries), "k_proj": (width, keys), "v_proj": (width, keys), "o_proj": (queries, width),
            "gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width),
        }  # fmt: skip

    @property
    def matrices(self) -> int:
        """Parameters of the blocks' linear layers."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, V · D."""
        return self.vocabulary * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of the language model."""
        return self.scalar_parameters - self.hidden_size + (0 if self.tied else self.embedding)

    @property
    def scalar_parameters(self) -> int:
        """Parameters with a scalar head in place of the output layer: a reward model or a critic."""
        return self.matrices + self.embedding + (2 * self.layers + 2) * self.hidden_size

    def adapter_parameters(self, config: AdapterConfig) -> int:
        """Parameters of a LoRA adapter: rank · (inputs + outputs) for each layer that it adapts."""
        adapted = [size for name, size in self.linears.items() if config.targets is None or name in config.targets]
        return self.layers * config.rank * sum(map(sum, adapted))

    @classmethod
    def of_scratch(cls, config: ScratchModel) -> Self:
        """Return the shape of a model that is built from nothing, with all of the vocabulary that it may have."""
        return cls(
            vocabulary=config.vocabulary, hidden_size=config.hidden_size, intermediate_size=8 * config.hidden_size // 3,
            layers=config.layers, heads=config.heads, kv_heads=config.heads,
            head_size=config.hidden_size // config.heads,
        )  # fmt: skip

    @classmethod
    def of_config(cls, config: Mapping[str, Any], named_by: str) -> Self:
        """Return the shape that a `config.json` of transformers describes.

        Raises:
            UserError: the model is none of `LIKE_LLAMA`, or a size is missing or wrong.
        """
        if (kind := config.get("model_type")) not in LIKE_LLAMA:
            raise UserError(
                f"{named_by}: model_type is {kind!r}; memory is computed for {', '.join(LIKE_LLAMA)}. Give the "
                "config.json of a model of about this size with --shape, or one of its known shapes "
                f"({', '.join(KNOWN)})."
            )
        try:
            heads, width = config["num_attention_heads"], config["hidden_size"]
            return cls(
                vocabulary=config["vocab_size"], hidden_size=width, intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"], heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
                head_size=config.get("head_dim") or width // heads, tied=config.get("tie_word_embeddings", False),
            )  # fmt: skip
        except KeyError as error:
            raise UserError(f"{named_by}: the model's config has no {error}.") from error
        except (ValidationError, TypeError, ZeroDivisionError) as error:
            raise UserError(f"{named_by}: a size in the model's config is wrong: {error}") from error

    @classmethod
    def of_path(cls, path: Path, named_by: str) -> Self:
        """Return the shape of the model in a folder, from its config.json or the header of its GGUF file, or that a
        config.json describes.

        Raises:
            UserError: there is none that can be read, or as `of_config`.
        """
        file = path / "config.json" if path.is_dir() else path
        files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
        if files and (file == path or not file.is_file()):
            return cls.of_config(_gguf_config(files[0]), f"{named_by}: {files[0]}")
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{named_by}: {file} cannot be read as JSON, and no GGUF file is there: {error}") from error
        return cls.of_config(config if isinstance(config, dict) else {}, f"{named_by}: {file}")


def _gguf_config(file: Path) -> dict[str, Any]:
    """Return what a config.json of transformers would say of the model in a GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    values = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return {
        "model_type": values["architecture"], "vocab_size": int(tensors["token_embd.weight"].shape[1]),
        "hidden_size": values["embedding_length"], "intermediate_size": values["feed_forward_length"],
        "num_hidden_layers": values["block_count"], "num_attention_heads": values["attention.head_count"],
        "num_key_value_heads": values.get("attention.head_count_kv"), "head_dim": values.get("attention.key_length"),
        "tie_word_embeddings": "output.weight" not in tensors,
    }  # fmt: skip


KNOWN = {
    "smollm2-135m": ModelShape(
        vocabulary=49152, hidden_size=576, intermediate_size=1536, layers=30, heads=9, kv_heads=3, head_size=64
    ),
    "llama-3.2-1b": ModelShape(
        vocabulary=128256, hidden_size=2048, intermediate_size=8192, layers=16, heads=32, kv_heads=8, head_size=64
    ),
    "llama-3.1-8b": ModelShape(
        vocabulary=128256, hidden_size=4096, intermediate_size=14336, layers=32, heads=32, kv_heads=8, head_size=128,
        tied=False,
    ),
}  # fmt: skip
"""Shapes by name: 134,515,008, 1,235,814,400 and 8,030,261,248 parameters."""


def read_shape(text: str) -> ModelShape:
    """Return the shape that `--shape` names: one of `KNOWN`, or a folder or config.json.

    Raises:
        UserError: it is none of these.
    """
    if text in KNOWN:
        return KNOWN[text]
    if (path := Path(text).expanduser()).exists():
        return ModelShape.of_path(path, "--shape")
    raise UserError(
        f"--shape {text}: no such model, folder or file. Give {', '.join(KNOWN)}, or a model's folder or config.json. "
        "The config.json needs only model_type, vocab_size, hidden_size, intermediate_size, num_hidden_layers and "
        "num_attention_heads."
    )
