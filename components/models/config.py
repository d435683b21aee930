"""Options of language models: shape, sampling, adapters. Importable without torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings


class GenerationConfig(Settings):
    """Sampling of responses: no top-k, top-p or repetition penalty, so log-probabilities are of what was sampled."""

    max_prompt_tokens: int = Field(256, ge=1)
    """Longest prompt in tokens, chat template included; a longer one loses its oldest turns, then its oldest tokens."""
    max_new_tokens: int = Field(64, ge=1)
    """Cap on a response's length in tokens, EOS included."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling; log-probabilities are taken at it."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = Field((), max_length=16)
    """Strings that end a response where they first stand in it, beside the tokenizer's EOS tokens. The response's text
    is what stands before. A demonstration or response of a pair that holds one ends there too, with EOS."""


class ScratchModel(Settings):
    """Shape of the Llama that is built where no pretrained base is named."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(3, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide `hidden_size` into even parts."""
    vocabulary: int = Field(600, ge=300)
    """Most tokens of the tokenizer: whole words where the demonstrations hold fewer, else byte-level BPE."""

    @property
    def parameters(self) -> int:
        """Parameters of the Llama with the whole vocabulary: tied embeddings, blocks with an MLP 8/3 as wide, norms."""
        width, inner = self.hidden_size, 8 * self.hidden_size // 3
        return self.vocabulary * width + self.layers * (4 * width**2 + 3 * width * inner + 2 * width) + width

    @model_validator(mode="after")
    def _heads_of_even_width(self) -> Self:
        if self.hidden_size % (2 * self.heads):  # rotary positions turn pairs of a head's dimensions
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of twice heads ({self.heads}), so that each head "
                "has an even width"
            )
        return self


class AdapterConfig(Settings):
    """Low-rank updates beside a frozen model's weights: W + alpha / rank · B A (Hu et al. 2022, section 4.1)."""

    rank: int = Field(8, ge=1)
    """Rank of each update."""
    alpha: int = Field(16, ge=1)
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers to adapt (`q_proj`, ...); null for all those of the transformer blocks."""
    quantize: Literal["4bit"] | None = None
    """Format of the frozen matrices beside the adapters. `4bit`: NF4 with quantised scales (Dettmers et al. 2023,
    "QLoRA"), by bitsandbytes; null keeps float32, or bfloat16 where `runtime.dtype` is that."""
