"""Shapes of Llama-like models and the parameters that follow from them, exactly. Importable without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from components.base.errors import UserError
from components.base.settings import Settings
from components.models.config import AdapterConfig, ScratchModel

LIKE_LLAMA = {"llama": (False, False), "mistral": (False, False), "qwen2": (True, False), "qwen3": (False, True)}
"""transformers' `model_type` to whether queries, keys and values have a bias, and whether queries and keys a norm."""


class ModelShape(Settings):
    """A decoder of blocks of attention (grouped queries) and a gated MLP, with RMSNorm and rotary positions."""

    vocabulary: int = Field(ge=1)
    """Rows of the embedding."""
    hidden_size: int = Field(ge=1)
    """Width of the residual stream, D."""
    intermediate_size: int = Field(ge=1)
    """Width of the MLP, I."""
    layers: int = Field(ge=1)
    """Transformer blocks."""
    heads: int = Field(ge=1)
    """Query heads."""
    kv_heads: int = Field(ge=1)
    """Heads of keys and values; must divide `heads`."""
    head_size: int = Field(ge=1)
    """Width of a head."""
    tied: bool = True
    """Whether the output layer is the embedding."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias."""
    output_bias: bool = False
    """Whether attention's output layer has one."""
    mlp_bias: bool = False
    """Whether the MLP's three layers have one."""
    qk_norm: bool = False
    """Whether queries and keys are normalised, a weight for each of a head's dimensions."""

    @model_validator(mode="after")
    def _groups(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        return self

    @property
    def queries(self) -> int:
        """Width of all query heads."""
        return self.heads * self.head_size

    @property
    def keys(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.kv_heads * self.head_size

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each linear layer of a block, by transformers' name."""
        width, inner = self.hidden_size, self.intermediate_size
        return {
            "q_proj": (width, self.queries), "k_proj": (width, self.keys), "v_proj": (width, self.keys),
            "o_proj": (self.queries, width), "gate_proj": (width, inner), "up_proj": (width, inner),
            "down_proj": (inner, width),
        }  # fmt: skip

    @property
    def matrices(self) -> int:
        """Parameters of the blocks' linear layers, biases left out."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.linears.values())

    @property
    def vectors(self) -> int:
        """Parameters that are no matrix: norms and biases."""
        width = self.hidden_size
        biases = self.qkv_bias * (self.queries + 2 * self.keys) + self.output_bias * width
        biases += self.mlp_bias * (2 * self.intermediate_size + width)
        return self.layers * (2 * width + biases + self.qk_norm * 2 * self.head_size) + width

    @property
    def embedding(self) -> int:
        """Parameters of the embedding."""
        return self.vocabulary * self.hidden_size

    @property
    def output(self) -> int:
        """Parameters of an output layer of its own; 0 where it is the embedding."""
        return 0 if self.tied else self.embedding

    @property
    def parameters(self) -> int:
        """Parameters of the language model."""
        return self.matrices + self.vectors + self.embedding + self.output

    @property
    def scalar_parameters(self) -> int:
        """Parameters with a scalar head in place of the output layer: a reward model or a critic."""
        return self.matrices + self.vectors + self.embedding + self.hidden_size

    def adapter_parameters(self, config: AdapterConfig) -> int:
        """Parameters of a LoRA adapter: rank · (inputs + outputs) for each layer that it adapts."""
        adapted = self.linears if config.targets is None else {n: self.linears[n] for n in config.targets}
        return self.layers * config.rank * sum(map(sum, adapted.values()))

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
            UserError: the model is none of `LIKE_LLAMA`, or the config lacks a size.
        """
        kind = config.get("model_type")
        if kind not in LIKE_LLAMA:
            raise UserError(
                f"{named_by}: model_type is {kind!r}; memory is computed for {', '.join(LIKE_LLAMA)}. Give sizes of "
                "a model like it with --shape, as in --shape hidden_size=2048,layers=16,..."
            )
        bias, norm = LIKE_LLAMA[kind]
        try:
            heads, width = config["num_attention_heads"], config["hidden_size"]
            return cls(
                vocabulary=config["vocab_size"], hidden_size=width, intermediate_size=config["intermediate_size"],
                layers=config["num_hidden_layers"], heads=heads, kv_heads=config.get("num_key_value_heads") or heads,
                head_size=config.get("head_dim") or width // heads,
                tied=config.get("tie_word_embeddings", False),
                qkv_bias=bias or config.get("attention_bias", False),
                output_bias=config.get("attention_bias", False) and kind != "qwen2",
                mlp_bias=config.get("mlp_bias", False), qk_norm=norm,
            )  # fmt: skip
        except KeyError as error:
            raise UserError(f"{named_by}: the model's config has no {error}.") from error

    @classmethod
    def of_folder(cls, folder: Path, named_by: str) -> Self:
        """Return the shape of the model in `folder`, from its config.json or the header of its GGUF file.

        Raises:
            UserError: there is neither, or as `of_config`.
        """
        if (folder / "config.json").is_file():
            return cls.of_file(folder / "config.json", named_by)
        files = sorted(folder.glob("*.gguf"))
        if not files:
            raise UserError(f"{named_by}: {folder} holds no config.json and no GGUF file.")
        return cls._of_gguf(files[0], named_by)

    @classmethod
    def of_file(cls, file: Path, named_by: str) -> Self:
        """Return the shape that a `config.json` describes. Raises `UserError` as `of_config`, or where it is not
        JSON."""
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{named_by}: {file} cannot be read as JSON: {error}") from error
        return cls.of_config(config if isinstance(config, dict) else {}, f"{named_by}: {file}")

    @classmethod
    def _of_gguf(cls, file: Path, named_by: str) -> Self:
        from gguf import GGUFReader

        reader = GGUFReader(file)
        kind = str(reader.fields["general.architecture"].contents())

        def field(name: str) -> Any:
            found = reader.fields.get(f"{kind}.{name}")
            return None if found is None else found.contents()

        tensors = {tensor.name: tensor for tensor in reader.tensors}
        config = {
            "model_type": kind, "vocab_size": int(tensors["token_embd.weight"].shape[1]),
            "hidden_size": field("embedding_length"), "intermediate_size": field("feed_forward_length"),
            "num_hidden_layers": field("block_count"), "num_attention_heads": field("attention.head_count"),
            "num_key_value_heads": field("attention.head_count_kv"), "head_dim": field("attention.key_length"),
            "tie_word_embeddings": "output.weight" not in tensors,
        }  # fmt: skip
        return cls.of_config(config, f"{named_by}: {file}")


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
    """Return the shape that `--shape` names: one of `KNOWN`, a folder or config.json, or `field=value,...`.

    What a list of fields leaves out follows from the rest: `intermediate_size` is 8/3 of the width as in Llama,
    `kv_heads` is `heads`, `head_size` is the width over the heads.

    Raises:
        UserError: it is none of these, or a size is missing or wrong.
    """
    if text in KNOWN:
        return KNOWN[text]
    path = Path(text).expanduser()
    if path.is_dir():
        return ModelShape.of_folder(path, "--shape")
    if path.is_file():
        return ModelShape.of_file(path, "--shape")
    pairs = dict(part.partition("=")[::2] for part in text.split(","))
    if "=" not in text:
        raise UserError(
            f"--shape {text}: no such model or folder. Give {', '.join(KNOWN)}, a folder with a config.json, or sizes "
            "as in vocabulary=128256,hidden_size=2048,layers=16,heads=32,kv_heads=8,intermediate_size=8192."
        )
    values: dict[str, Any] = {name.strip(): value.strip() for name, value in pairs.items()}
    width, heads = values.get("hidden_size", ""), values.get("heads", "")
    if width.isdigit() and heads.isdigit() and int(heads):
        values.setdefault("intermediate_size", 8 * int(width) // 3)
        values.setdefault("kv_heads", heads)
        values.setdefault("head_size", int(width) // int(heads))
    try:
        return ModelShape.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])) or "sizes"
        raise UserError(f"--shape {text}: {name}: {first['msg']}.") from error
