"""Options of candidates: responses to label, and pairs of them. Importable without torch."""

from typing import Annotated

from pydantic import Field, field_validator

from components.base.settings import Settings
from components.models.config import GenerationConfig
from components.models.runtime import Runtime


class CandidatesConfig(Settings):
    """Responses to label: how many, from what, and which of them make a pair."""

    temperatures: tuple[Annotated[float, Field(gt=0, le=100)], ...] = Field((0.7, 1.0), min_length=1)
    """Softmax temperatures that every model is sampled at."""
    per_prompt: int = Field(4, ge=1)
    """Responses drawn a prompt, spread over models and temperatures; identical ones are kept once."""
    pairs: int = Field(1, ge=0)
    """Pairs to label a prompt; fewer where it has fewer different responses."""
    max_prompts: int | None = Field(None, ge=1)
    """At most this many prompts, a seeded choice that doesn't depend on their order; null takes all."""
    max_characters: int = Field(20_000, ge=10)
    """Longest prompt, and prompt and longer response of a pair, in characters: what `data.max_characters` lets in."""
    batch_size: int = Field(64, ge=1)
    """Responses generated at a time, and between checkpoints."""

    @field_validator("temperatures")
    @classmethod
    def _distinct(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each temperature may be given once")
        return value


class CandidatesJob(Settings):
    """What the candidates' bytes depend on, beside prompts and models."""

    seed: int
    """Seed of the choice of prompts, the responses, the pairs and their blinding."""
    runtime: Runtime
    """The machine that generates."""
    generation: GenerationConfig
    """How responses are sampled, at each of `candidates.temperatures` in place of its own."""
    candidates: CandidatesConfig
    """Responses and pairs."""
