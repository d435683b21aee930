"""AdamW with its schedule, default rates and options, for every training stage. Importable without torch."""

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from components.base.settings import Settings, unkeyed

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import AdamW


SMALL, LARGE = 1e6, 1e9
"""Numbers of parameters between which rates follow a power law; outside they are constant."""
LORA = 10.0
"""Factor for an adapter's rate: the best rate of a LoRA adapter is about ten times that of the whole model, over sizes
and tasks (Schulman et al. 2025, "LoRA Without Regret")."""


class Ends(NamedTuple):
    """Peak learning rates of AdamW for whole models of `SMALL` and of `LARGE` parameters."""

    small: float
    large: float


Trained = Literal["sft", "reward", "ppo", "ppo.critic", "policy"]
ENDS: dict[Trained, Ends] = {
    "sft": Ends(1e-3, 2e-5),
    "reward": Ends(5e-4, 1e-5),
    "ppo": Ends(3e-4, 1e-6),
    "ppo.critic": Ends(1e-3, 1e-5),
    "policy": Ends(3e-4, 1e-6),
}
"""At `SMALL`, the rates with which the built-in task was developed. At `LARGE`, those usual for 1 to 70 billion
parameters (Touvron et al. 2023, "Llama 2", sections 3.1 to 3.2.3: 2e-5, 1e-5, 1e-6; a critic's 9e-6 in OpenRLHF).
`policy` is a direct method's: PPO's at `SMALL`, and that of Rafailov et al. 2023, appendix B, at `LARGE`."""


def default_rate(trained: Trained, parameters: int, lora: bool = False) -> float:
    """Return a default peak learning rate for a model of `parameters`, to two digits. It is only a starting point.

    small · (n / 1e6)^(log10(large / small) / 3), with n = `parameters` clipped to [1e6, 1e9]; ten times as much for an
    adapter.
    """
    small, large = ENDS[trained]
    share = math.log(min(max(parameters, SMALL), LARGE) / SMALL) / math.log(LARGE / SMALL)
    return float(f"{small * (large / small) ** share * (LORA if lora else 1.0):.2g}")


def named_rate(rate: float | None) -> float:
    """Return `rate`. Raises `ValueError` if it is null, which only the config of a run that has not begun may have."""
    if rate is None:
        raise ValueError("learning_rate is null: a run's config holds the number that was chosen when it began")
    return rate


class OptimizerConfig(Settings):
    """AdamW with linear warm-up, then constant or linear decay, and gradient clipping by global norm."""

    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw` keeps two float32 moments per parameter, 8 bytes. `adamw_8bit` keeps the moments of matrices in 8 bits
    with a scale per block of 256, 2 bytes (Dettmers et al. 2022, arXiv 2110.02861), by bitsandbytes."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Peak learning rate; null chooses one when a run begins, by the model's size and by whether an adapter or the
    whole model is trained (`components/training/optim.py`)."""
    warmup: float = Field(0.05, ge=0, le=1)
    """Share of the steps in which the learning rate rises linearly from 0."""
    decay: Literal["linear", "none"] = "linear"
    """The schedule after the warm-up: linear decay to 0 at the last step, or constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices (vectors have none)."""
    beta2: float = Field(0.99, gt=0, lt=1)
    """Decay of AdamW's second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Global norm to which gradients are clipped."""
    gradient_checkpointing: bool = unkeyed(False)
    """Keep only the input of each transformer block, and compute the rest again for the gradient. Needs less memory and
    more time; the result is the same."""

    checkpoint_whole: float = unkeyed(32.0, ge=0)
    """GB of sharded weights and moments up to which rank 0 gathers them and writes the whole checkpoint. Above that
    each rank writes its own part, and nothing is gathered."""

    @property
    def peak(self) -> float:
        """Return the peak learning rate of a run that has begun. Raises `ValueError` if none was chosen."""
        return named_rate(self.learning_rate)


class ObserverPlugin(Settings):
    """An observer of a training. Its name alone may be written: `ppo.observers=[words]`."""

    plugin: str
    """An entry point of the group `tether.observers`: a class, or function, that takes no argument and returns an
    object with `on_update(update)`, and, if it has a state, `state()` and `restore(state)`."""
    code: str = "auto"
    """Name and version of its distribution and sha256 of its files; each run computes it again."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_name(cls, value: object) -> object:
        return {"plugin": value} if isinstance(value, str) else value


class FitWatchConfig(Settings):
    """Held-out evaluations during supervised training. `evaluate_every` sets how often they run."""

    examples: int = Field(256, ge=2)
    """Largest number of examples, on which no gate judges. For `reward` they are the first pairs of the calibration
    split; for `sft` the last held-out demonstrations, at most half, which are then left out of the final evaluation."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row that did not lower the lowest loss; null: never."""


class PassesConfig(OptimizerConfig):
    """Options of the training loop over a fixed set of examples: passes, batches and checkpoints."""

    epochs: int = Field(1, ge=1)
    """Passes over the examples (demonstrations, or pairs)."""
    batch_size: int = Field(32, ge=1)
    """Examples per optimiser step."""
    micro_batch_size: int = Field(32, ge=1)
    """Examples per forward pass (a pair is one example); gradients accumulate up to `batch_size`."""
    checkpoint_every: int = unkeyed(100, ge=1)
    """Optimiser steps between checkpoints."""
    checkpoint_minutes: float | None = unkeyed(10.0, gt=0)
    """Also write a checkpoint when this many minutes have passed since the last one; null: count only steps."""


class FitConfig(PassesConfig):
    """Options of supervised training: the loop's, and held-out evaluations by the loss."""

    evaluate_every: int | None = Field(None, ge=1)
    """Optimiser steps between evaluations on held-out examples. The checkpoint with the lowest loss is published
    instead of the last one if its loss is certainly lower. Useful for several passes over few examples. Null: no
    evaluations, and the last is published."""
    watch: FitWatchConfig = FitWatchConfig()
    """What the evaluations of `evaluate_every` use and decide."""

    @model_validator(mode="after")
    def _patience_counts_evaluations(self) -> Self:
        if self.watch.patience is not None and self.evaluate_every is None:
            raise ValueError("watch.patience counts evaluations, and there are none: set evaluate_every")
        return self


def build_optimizer(model: "nn.Module", config: OptimizerConfig) -> "AdamW":
    """Create the optimiser for the parameters of `model` that take gradients, in their order.

    Raises:
        UserError: as for `components.models.matrices.eight_bit.adamw_8bit`.
    """
    from torch.optim import AdamW

    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if config.optimizer == "adamw_8bit":
        from components.models.matrices.eight_bit import adamw_8bit

        return adamw_8bit(groups, config.peak, (0.9, config.beta2), config.epsilon)
    return AdamW(groups, lr=config.peak, betas=(0.9, config.beta2), eps=config.epsilon, fused=True)


def learning_rate_at(step: int, steps: int, config: OptimizerConfig) -> float:
    """Return the learning rate of optimiser step `step` (from 0) of `steps`."""
    warmup = max(1, round(config.warmup * steps))
    if step < warmup:
        return config.peak * (step + 1) / warmup
    if config.decay == "none":
        return config.peak
    return config.peak * (steps - step) / max(1, steps - warmup)


def set_learning_rate(optimizer: "AdamW", rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = rate
