"""Options of language models: shape, sampling, adapters. Importable without torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings

PREFILL_PARTS = {"cpu": 8, "cuda": 1}
"""Prompts are processed in this many parts by device type, sorted by length, each padded to its own longest prompt. To
launch a pass takes a GPU's host longer than padding takes the GPU."""
CAPTURED_TOKENS = 128
"""Number of slots by which the window of a captured decoding step grows. A step is replayed until its window is
full."""
LOGITS_AT_ONCE = 2**26
"""Largest number of float32 logits in memory at a time (256 MiB); more tokens are processed in chunks."""


class GenerationConfig(Settings):
    """Sampling of responses. There is no top-k, top-p or repetition penalty, so log-probabilities are those of the
    distribution that was sampled from."""

    max_prompt_tokens: int = Field(256, ge=1)
    """Longest prompt in tokens, chat template included; a longer one loses its oldest turns, then its oldest tokens."""
    max_new_tokens: int = Field(64, ge=1)
    """The cap: the largest number of tokens in a response, including EOS."""
    temperature: float = Field(1.0, gt=0)
    """Softmax temperature of sampling. Log-probabilities are computed at this temperature."""
    stop: tuple[Annotated[str, Field(min_length=1, max_length=100)], ...] = Field((), max_length=16)
    """Strings that end a response where they first occur, in addition to the tokenizer's EOS tokens. The response's
    text ends before the string. A demonstration or a pair's response that contains one is also ended there, with
    EOS."""


class ChatTemplateConfig(Settings):
    """What changes in the chat template of a pretrained base. The exported model's template contains these changes."""

    chat_template: str | None = Field(None, min_length=1, max_length=100_000)
    """The chat template, which replaces that of the tokenizer of `base`: `chatml`, `llama3`, `plain`, a file with a
    Jinja template, or the template's text, which the run's config then contains. Markers that it writes, such as
    <|im_start|>, become tokens if the tokenizer lacks them; the one that closes a response becomes EOS."""
    template_variables: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str] = Field({})
    """Values of variables that the chat template reads, such as `enable_thinking: false`."""
    system_in_question: bool = False
    """Put a system message before the first question, with an empty line between, for a chat template that refuses or
    drops system messages."""


GivenTemplate = str | ChatTemplateConfig | None
"""A chat template's name or text, all its options, or the tokenizer's own."""


class ScratchModel(Settings):
    """Shape of the Llama that is built if no pretrained base is named."""

    hidden_size: int = Field(128, ge=8)
    """Width of the residual stream."""
    layers: int = Field(3, ge=1)
    """Transformer blocks."""
    heads: int = Field(4, ge=1)
    """Attention heads; must divide `hidden_size` into even parts."""
    vocabulary: int = Field(600, ge=300)
    """Largest number of tokens in the vocabulary. The tokens are whole words if the demonstrations have few enough
    different ones, else byte-level BPE."""

    @property
    def parameters(self) -> int:
        """Return the number of parameters with the whole vocabulary: tied embeddings, blocks (MLP 8/3 as wide),
        norms."""
        width, inner = self.hidden_size, 8 * self.hidden_size // 3
        return self.vocabulary * width + self.layers * (4 * width**2 + 3 * width * inner + 2 * width) + width

    @model_validator(mode="after")
    def _heads_of_even_width(self) -> Self:
        if self.hidden_size % (2 * self.heads):  # rotary embeddings rotate pairs of a head's dimensions
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of twice heads ({self.heads}), so that each head "
                "has an even width"
            )
        return self


class AdapterConfig(Settings):
    """Low-rank updates of a frozen model's weights: W + alpha / rank · B A (Hu et al. 2022, LoRA, section 4.1)."""

    rank: int = Field(8, ge=1)
    """Rank of each update."""
    alpha: int = Field(16, ge=1)
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers to adapt (`q_proj`, ...); null for all those of the transformer blocks."""
    quantize: Literal["4bit"] | None = None
    """Format of the frozen matrices. `4bit`: NF4 with quantised scales (Dettmers et al. 2023, "QLoRA"), by
    bitsandbytes. Null: the format of `runtime.dtype`, float32 or bfloat16."""
