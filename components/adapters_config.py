"""Options of a LoRA adapter. Importable without torch."""

from pydantic import Field

from components.settings import Settings


class AdapterConfig(Settings):
    """Low-rank updates beside a frozen model's weights: W + alpha / rank · B A (Hu et al. 2022, section 4.1)."""

    rank: int = Field(8, ge=1)
    """Rank of each update."""
    alpha: int = Field(16, ge=1)
    """The update is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = Field(None, min_length=1)
    """Names of the linear layers to adapt (`q_proj`, ...); null for all those of the transformer blocks."""
