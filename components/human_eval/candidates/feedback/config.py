"""Options of a judge behind an endpoint. Importable without torch."""

from pydantic import Field

from components.base.settings import Settings, unkeyed


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
