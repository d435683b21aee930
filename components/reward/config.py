"""Options of the reward model. Importable without torch."""

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from components.base.settings import Settings, unkeyed
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime
from components.training.optim import FitConfig

BINS = 10
"""Number of equal-mass bins of the expected calibration error."""


def _no_gate_of_all_suites(name: str) -> str:
    if name.startswith("accuracy"):
        raise ValueError(f"reward/suite_{name} is a metric of all suites, which a gate judges: choose another name")
    return name


SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$"), AfterValidator(_no_gate_of_all_suites)]


class EnsembleConfig(Settings):
    """How the scores of several reward models are combined (Coste et al. 2024, arXiv 2310.02743)."""

    ensemble: Literal["mean", "minimum", "lower"] = "mean"
    """The members' mean; their minimum (worst case); or `lower`: their mean minus the standard
    deviation of the members' scores."""


class RefreshConfig(Settings):
    """Continue training an earlier run's reward model with new pairs."""

    from_run: str = unkeyed(min_length=1)
    """Id of a run in this home. The key contains the digests of its reward model and of its data."""
    replay: float = Field(0.25, ge=0, lt=1)
    """Share of old pairs in the training pairs, so that the model does not forget them. They are chosen at random; all
    are used if there are fewer. Ibrahim et al. 2024 (arXiv 2403.08763) needed 5 % where new data resembled the old and
    25 % where they did not. Preference data are small, so the larger share costs little."""


class RewardConfig(FitConfig):
    """A scalar head (or one per objective) on the SFT checkpoint, trained with the Bradley-Terry loss."""

    shared_prompts: bool = True
    """Compute the beginning that a pair's two sequences share (the prompt) only once. Set to false for models in which
    tokens interact by other means than full attention; this is checked before training."""
    max_pairs: int | None = Field(None, ge=1)
    """Train on this many pairs at most (the first ones, in data order); null for all."""
    members: int = Field(1, ge=1)
    """Number of reward models to train, each from a different head and on the pairs in a different random order. All
    are published. Their mean score is calibrated, and PPO's reward combines them by `ppo.score.ensemble`."""
    head_start: Literal["normal", "zeros"] = "normal"
    """Initialisation of the heads. `normal`: random with variance 1/(d+1) for d inputs (Stiennon et al. 2020). `zeros`:
    all scores start equal and the loss at log 2. This is better for few, noisy pairs, which otherwise first have to
    unlearn the random head's differences. Members that start from zeros differ only in their order of pairs and in
    `member_share`."""
    member_share: float = Field(1.0, gt=0, le=1)
    """Each member trains on the pairs of its own random share of the prompts, which makes members differ more."""
    labels: Literal["majority", "shares"] = "majority"
    """The target of a pair's predicted probability. `majority`: 1 for the chosen response. `shares`: the share of the
    votes that the chosen response got (the distribution μ of Christiano et al. 2017, section 2.2.3), 1 if a pair has no
    votes."""
    objectives: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """Maps an objective's name to its weight. Each gets a head, trained on the share of votes on that objective (as
    `labels: shares`), and the score is the heads' weighted sum. Empty: one head, trained on the overall label."""
    scale_responses: int = Field(512, ge=16)
    """Number of SFT responses, to prompts of the calibration split, on which the score's shift and scale are
    measured."""
    probe_texts: int = Field(640, ge=2)
    """Number of chosen responses of the test split that are probed with added tails (filler, flattery, ...)."""
    suites: dict[SuiteName, str] = unkeyed(default_factory=dict)
    """Maps a name of your choice to a file of judged pairs on which the trained model is evaluated, as by `tether
    eval`. The pairs are never trained on; the key contains the files' digests."""
    lora: AdapterConfig | None = None
    """Train a LoRA adapter and the head on the frozen SFT model; null trains the whole model."""
    refresh: RefreshConfig | None = None
    """Start from an earlier run's reward model, and report what changed on its test pairs; null starts from SFT."""

    @model_validator(mode="after")
    def _objectives_have_shares(self) -> Self:
        if self.objectives and self.labels == "shares":
            raise ValueError("objectives are learned from their own shares of votes: leave labels out")
        return self

    @property
    def heads(self) -> tuple[str, ...]:
        """Return the names of the heads, in their order in the model; empty for the single overall head."""
        return tuple(sorted(self.objectives))


class RewardJob(Settings):
    """Everything except the inputs on which the stage's output depends."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    reward: RewardConfig


class JudgeConfig(Settings):
    """Options of an independent judge's training that differ from `reward`. `reward.objectives`, `max_pairs` and
    `refresh` do not apply to it."""

    epochs: int | None = Field(None, ge=1)
    """Passes over its pairs; null: `reward.epochs`. It has fewer pairs than the reward model, so more passes help."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Peak learning rate; null: `reward.learning_rate`."""


class JudgeJob(RewardJob):
    """Everything except the inputs on which an independent judge depends."""

    judge: JudgeConfig = JudgeConfig()
    """How the judge of `data.judge_preferences` is trained."""

    @field_validator("reward", mode="after")
    @classmethod
    def _of_one_head(cls, reward: RewardConfig) -> RewardConfig:
        return reward.model_copy(update={"objectives": {}, "max_pairs": None, "refresh": None})

    def as_reward(self, seed: int) -> RewardJob:
        """Return the job that trains the judge in the way of the stage `reward`."""
        options = {name: value for name, value in self.judge.model_dump().items() if value is not None}
        reward = self.reward.model_copy(update=options)
        return RewardJob(seed=seed, runtime=self.runtime, generation=self.generation, reward=reward)


class SheetScoresJob(Settings):
    """Everything except the inputs on which the reward model's scores of the pairs that people judge depend."""

    seed: int
    """The run's seed (not used: nothing is random)."""
    runtime: Runtime
    """The machine that scores."""
    generation: GenerationConfig
    """The length limits to which prompts and responses are cut."""
