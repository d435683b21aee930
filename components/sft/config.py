"""Options of supervised fine-tuning. Importable without torch."""

from typing import Self

from pydantic import Field, model_validator

from components.generation import GenerationConfig
from components.optim import OptimizerConfig
from components.runtime import Runtime
from components.settings import Settings, unkeyed


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

    @model_validator(mode="after")
    def _heads_of_even_width(self) -> Self:
        if self.hidden_size % (2 * self.heads):  # rotary positions turn pairs of a head's dimensions
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of twice heads ({self.heads}), so that each head "
                "has an even width"
            )
        return self


class SftConfig(OptimizerConfig):
    """Supervised fine-tuning: cross-entropy on the response's tokens, EOS among them; the prompt is masked."""

    base: str | None = unkeyed(None)
    """Folder of a pretrained model (Hugging Face, or one GGUF file); null builds `scratch` from nothing."""
    scratch: ScratchModel = ScratchModel()
    """The model to build where `base` is null."""
    epochs: int = Field(1, ge=1)
    """Passes over the demonstrations."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations an optimiser step."""
    micro_batch_size: int = Field(32, ge=1)
    """Demonstrations a forward pass; gradients accumulate up to `batch_size`."""
    max_demonstrations: int | None = Field(None, ge=1)
    """Train on this many demonstrations at most (the first ones, in data order); null for all."""
    evaluate: int = Field(512, ge=1)
    """Held-out demonstrations for loss and perplexity, and held-out prompts to sample responses to."""
    checkpoint_every: int = unkeyed(100, ge=1)
    """Optimiser steps between checkpoints."""
    checkpoint_minutes: float | None = unkeyed(10.0, gt=0)
    """Minutes between checkpoints, where they pass before so many steps; null for steps alone."""


class SftJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    sft: SftConfig
