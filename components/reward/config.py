"""Options of the reward model. Importable without torch."""

from typing import Literal

from pydantic import Field

from components.adapters_config import AdapterConfig
from components.generation import GenerationConfig
from components.optim import OptimizerConfig
from components.runtime import Runtime
from components.settings import Settings, unkeyed


class EnsembleConfig(Settings):
    """What becomes of the scores of several reward models (Coste et al. 2024)."""

    ensemble: Literal["mean", "minimum", "lower"] = "mean"
    """The members' mean, their minimum (worst case), or their mean less `ensemble_deviations` standard deviations."""
    ensemble_deviations: float = Field(1.0, ge=0)
    """k of `lower`."""


class RewardConfig(OptimizerConfig):
    """A scalar head on the SFT checkpoint, trained with the Bradley-Terry loss."""

    learning_rate: float = Field(5e-4, gt=0, le=1)
    """Peak learning rate."""
    epochs: int = Field(1, ge=1)
    """Passes over the training pairs."""
    batch_size: int = Field(32, ge=1)
    """Pairs an optimiser step."""
    micro_batch_size: int = Field(32, ge=1)
    """Pairs a forward pass (both responses of each); gradients accumulate up to `batch_size`."""
    max_pairs: int | None = Field(None, ge=1)
    """Train on this many pairs at most (the first ones, in data order); null for all."""
    members: int = Field(1, ge=1)
    """Reward models to train, each from a head and in an order of its own. They are calibrated as one, by their mean
    score; PPO is rewarded by what `ppo.score.ensemble` makes of them."""
    use_margin: bool = False
    """Subtract a pair's `margin`, where the data has one, from its score difference (Llama 2, equation 2)."""
    calibration_bins: int = Field(10, ge=2)
    """Equal-mass bins of the expected calibration error."""
    scale_responses: int = Field(512, ge=16)
    """SFT responses, on prompts of the calibration split, that the score's shift and scale are measured on."""
    probe_texts: int = Field(560, ge=2)
    """Chosen responses of the test split that tails (filler, flattery, ...) are probed on."""
    lora: AdapterConfig | None = None
    """Train a LoRA adapter (and the head) beside the frozen SFT model; null trains all of it."""
    checkpoint_every: int = unkeyed(100, ge=1)
    """Optimiser steps between checkpoints."""


class RewardJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    reward: RewardConfig
