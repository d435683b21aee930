"""Options of candidates (responses to label, and pairs of them) and of a judge behind an endpoint. Importable without
torch."""

from typing import Annotated

from pydantic import Field, field_validator

from components.base.settings import Settings, unkeyed
from components.models.config import GenerationConfig
from components.models.runtime import Runtime


class CandidatesConfig(Settings):
    """How many responses to sample for labelling, at which temperatures, and how many pairs to make from them."""

    temperatures: tuple[Annotated[float, Field(gt=0, le=100)], ...] = Field((0.7, 1.0), min_length=1)
    """Softmax temperatures at which every model is sampled."""
    per_prompt: int = Field(4, ge=1)
    """Responses per prompt, spread over models and temperatures; identical ones are kept once."""
    pairs: int = Field(1, ge=0)
    """Pairs per prompt to label; fewer if it has fewer different responses."""
    max_prompts: int | None = Field(None, ge=1)
    """At most this many prompts, chosen by the seed and independent of their order; null takes all."""
    max_characters: int = Field(20_000, ge=10)
    """Limit in characters on a prompt, and on a prompt with the longer response of its pair; set it to
    `data.max_characters`, above which pairs are quarantined when read."""
    batch_size: int = Field(64, ge=1)
    """Responses generated at a time, and between checkpoints."""

    @field_validator("temperatures")
    @classmethod
    def _distinct(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < len(value):
            raise ValueError("each temperature may be given once")
        return value


class CandidatesJob(Settings):
    """Everything except prompts and models on which the candidates' bytes depend."""

    seed: int
    """Seed of the choice of prompts, the responses, the pairs and their blinding."""
    runtime: Runtime
    """The machine that generates."""
    generation: GenerationConfig
    """How responses are sampled; `candidates.temperatures` replace its temperature."""
    candidates: CandidatesConfig
    """Responses and pairs."""


class EndpointConfig(Settings):
    """A model behind an OpenAI-compatible endpoint."""

    url: str = Field(..., pattern=r"^https?://[^\s?#]+$")
    """Its address up to `/v1`."""
    model: str = Field(..., min_length=1)
    """The model's name there."""
    max_tokens: int = Field(16, ge=1)
    """Most tokens of an answer. A model that reasons before it answers needs many."""
    timeout: float = unkeyed(120.0, gt=0)
    """Time limit of one answer in seconds."""
    patience: float = unkeyed(300.0, ge=0)
    """How many seconds to retry if the endpoint does not answer, or answers 429 or 5xx."""
