"""What the validate stage's output depends on. Importable without torch or pandas."""

from typing import Any

from pydantic import field_validator

from components.base.settings import Settings
from components.data.config import DataConfig
from components.models.config import GenerationConfig


class TokenizerConfig(Settings):
    """The options that the run's own tokenizer depends on, if it has no pretrained one."""

    vocabulary: int
    """Most tokens."""
    max_demonstrations: int | None
    """It is made from this many training demonstrations; null for all."""


class ValidateJob(Settings):
    """What the validate stage's output depends on, beside its input files and the pretrained tokenizer."""

    seed: int
    """Seed of the generator, of samples, and of the choice of `max_pairs`."""
    generation: GenerationConfig
    """Lengths that texts are cut to."""
    data: DataConfig
    """Sources, formats, splits, checks and limits."""
    sft: TokenizerConfig
    """The part of SFT's options that makes the tokenizer."""

    @field_validator("sft", mode="before")
    @classmethod
    def _of_sft(cls, given: Any) -> Any:
        scratch = getattr(given, "scratch", None)  # SftConfig is not imported: its other options are no part of the key
        return {"vocabulary": scratch.vocabulary, "max_demonstrations": given.max_demonstrations} if scratch else given
