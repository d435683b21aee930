"""Options of the policy's method. Importable without torch."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from components.base.nested import merge, selected
from components.base.settings import Settings
from components.gates.methods import Method, is_used
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime
from components.ppo.config import PpoConfig, PpoJob
from components.training.optim import PassesConfig


class PolicyConfig(PassesConfig):
    """How the stage `ppo` trains the policy. All options but `method` are those of the direct methods; PPO's stand
    under `ppo`, as do those that measure any policy."""

    method: Method = "ppo"
    """`ppo` samples from the policy and learns from the reward model. `online_dpo` samples as PPO does, with PPO's
    options, and learns which of two responses the reward model prefers (Guo et al. 2024). `best_of_n` fine-tunes the
    policy on the reward model's choice of several responses. The others learn from the preference pairs alone: `dpo`
    (Rafailov et al. 2023), `ipo` (Azar et al. 2023), `kto` (Ethayarajh et al. 2024), which also takes single labels;
    the reward model then only measures. docs/guide/methods.md says when to take which."""
    n: int = Field(8, ge=2)
    """Responses to a prompt of which `best_of_n` takes the one with the highest score. Their KL to SFT is at most
    log n - (n - 1) / n nats, 1.2 for 8 (Beirami et al. 2024, arXiv 2401.01879, theorem 1)."""
    rounds: int = Field(1, ge=1)
    """How often `best_of_n` samples and trains; from the second round on it samples from the last policy of the one
    before. Only a policy of the last round is published. A round that KL's limits stop is the last."""
    max_prompts: int | None = Field(None, ge=1)
    """Prompts to which `best_of_n` samples, at most (the first ones, in data order); null for all."""
    beta: float = Field(0.1, gt=0)
    """Strength of the tether to SFT: β of `dpo` and `kto`, τ of `ipo`. A larger one keeps the policy closer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | Literal["auto"] = 0.0
    """ε, the share of labels that are believed to be flipped. `auto` takes the estimate of the stage validate,
    `data/label_noise`."""
    form: Literal["plain", "robust"] = "plain"
    """What ε does. `plain`: label smoothing, which weakens every label. `robust`: the loss whose expectation over
    flipped labels is that of true ones (Chowdhury et al. 2024)."""
    soft_labels: bool = False
    """Use the share of votes for the chosen response as the label; 1 for a pair without votes."""
    margin: float = Field(0.0, ge=0)
    """Logits by which implicit rewards should differ per unit of a pair's `margin`; 0 ignores margins."""
    desirable_weight: float = Field(1.0, gt=0)
    """λ_D, the weight of chosen responses, and of single ones that are labelled desirable, in `kto`."""
    undesirable_weight: float = Field(1.0, gt=0)
    """λ_U, the weight of rejected responses, and of single ones that are labelled undesirable, in `kto`."""
    max_pairs: int | None = Field(None, ge=1)
    """Train on this many pairs, and `kto` on this many single labels, at most (the first ones); null for all."""
    lora: AdapterConfig | None = None
    """Train a LoRA adapter of this shape. The reference is then the backbone without the adapter, and `reward.lora`
    must be set too. Null trains the whole model."""
    evaluate_every: int | None = Field(None, ge=1)
    """Optimiser steps between evaluations on prompts of the calibration split (`ppo.watch`), by score and KL to SFT.
    The best evaluated policy inside `ppo.kl.band` is published, as with PPO. Null: no such evaluations, and the last
    policy is published."""

    stop_on_alarm: bool = False
    """Whether the alarm `chosen` stops the training and fails it (gate `ppo.stopped`). It is raised where chosen
    responses fall below SFT by more than `gates.policy.chosen_log_ratio` allows, and otherwise only warns. That
    threshold is then part of the key."""

    def measured(self, ppo: PpoConfig) -> PpoConfig:
        """Return PPO's options, as `DirectJob.ppo` has them, by which PPO's code measures a policy of this method."""
        sizes = dict.fromkeys(("batch_size", "minibatch_size", "micro_batch_size"), 2 * self.micro_batch_size)
        options = {"advantage": "rloo", "group_size": 2, "lora": self.lora, "evaluate_every": self.evaluate_every}
        return ppo.model_copy(update=options | sizes)

    @property
    def unused(self) -> tuple[str, ...]:
        """Return the names, as in `Models`, of the frozen models that no step of the training uses."""
        if self.evaluate_every is not None:
            return ()
        return ("reward_model", "judge", *(() if self.method == "kto" else ("sft", "reference")))

    @property
    def noise(self) -> float:
        """Return ε. Raises `ValueError` if it is still `auto`, which a stage's job never is."""
        return float(self.label_smoothing)


class DirectJob(Settings):
    """Everything except the inputs on which a policy depends that a direct method trains."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    policy: PolicyConfig
    ppo: PpoConfig
    """Only the options that measure any policy; all others have their defaults."""
    chosen_limit: float | None = None
    """The threshold of the gate `policy.chosen_log_ratio`, below which the alarm `chosen` is raised; None for none. It
    is in the key only if the alarm stops the training."""

    @field_validator("ppo", mode="before")
    @classmethod
    def _only_what_measures(cls, value: Any, info: ValidationInfo) -> Any:
        values = value.model_dump() if isinstance(value, PpoConfig) else value
        if not isinstance(values, Mapping) or "policy" not in info.data:
            return values
        method = info.data["policy"].method
        measuring = selected(values, lambda option: is_used(method, f"ppo.{option}"))
        return merge({"kl": {"control": "fixed"}}, measuring)

    def uses(self, option: str) -> bool:
        """Return whether the method uses an option. Other options are not in the key."""
        if option == "chosen_limit":
            return self.policy.stop_on_alarm and is_used(self.policy.method, "policy.stop_on_alarm")
        return is_used(self.policy.method, option)

    @property
    def measured(self) -> PpoJob:
        """Return the job by which PPO's code loads the models, without a critic, and evaluates a policy."""
        ppo = self.policy.measured(self.ppo)
        return PpoJob(seed=self.seed, runtime=self.runtime, generation=self.generation, ppo=ppo)
