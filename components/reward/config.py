"""Options of the reward model. Importable without torch."""

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from components.base.settings import Settings, unkeyed
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime
from components.training.optim import FitConfig

SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,39}$")]


class EnsembleConfig(Settings):
    """What becomes of the scores of several reward models (Coste et al. 2024)."""

    ensemble: Literal["mean", "minimum", "lower"] = "mean"
    """The members' mean, their minimum (worst case), or their mean less `ensemble_deviations` standard deviations."""
    ensemble_deviations: float = Field(1.0, ge=0)
    """k of `lower`."""


class RefreshConfig(Settings):
    """An earlier run's reward model, to continue from with new pairs."""

    from_run: str = unkeyed(min_length=1)
    """Id of the run in this home, or the folder of a run in another one, as `../old/.tether/runs/ID`. The key holds the
    digests of its reward model and of its data."""
    replay: float = Field(0.25, ge=0, lt=1)
    """Share of old pairs among those trained on, so that old ones aren't forgotten; a random choice, all of them where
    they are fewer. Ibrahim et al. 2024 (arXiv 2403.08763) needed a twentieth where new data were like the old
    and a quarter where they weren't; preference data are small, so the surer of the two costs little."""


class RewardConfig(FitConfig):
    """A scalar head (or one per objective) on the SFT checkpoint, trained with the Bradley-Terry loss."""

    shared_prompts: bool = True
    """Compute what a pair's two sequences begin with once, for both; false for models whose tokens meet by other ways
    than full attention, which is checked before training."""
    max_pairs: int | None = Field(None, ge=1)
    """Train on this many pairs at most (the first ones, in data order); null for all."""
    members: int = Field(1, ge=1)
    """Reward models to train, each in an order of its own."""
    combine: Literal["ensemble", "average"] = "ensemble"
    """What becomes of several. `ensemble`: each starts from a head of its own and is published; they are calibrated as
    one, by their mean score, and PPO is rewarded by what `ppo.score.ensemble` makes of them. `average`: all start from
    one head, and one model of their mean weights is published (Ramé et al. 2024, "WARM")."""
    head_start: Literal["normal", "zeros"] = "normal"
    """The heads before training. `normal`: drawn with variance 1/(d+1) for d inputs (Stiennon et al. 2020). `zeros`:
    all scores are equal and the loss begins at log 2; better for few, noisy pairs, which else have to unlearn the drawn
    head's differences first. Members that start from zeros differ in their order and share alone."""
    member_share: float = Field(1.0, gt=0, le=1)
    """Each member trains on the pairs of a random share of the prompts, drawn for it: so members come to disagree."""
    labels: Literal["majority", "shares"] = "majority"
    """What a score difference is drawn to: `majority`, certainty of the label; `shares`, the share of the votes that
    the chosen response got (Christiano et al. 2017, equation 1), certainty where a pair has no votes."""
    objectives: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    """A head for each name, trained on the pairs' share of votes on it (always as `shares`), and its weight in the
    score, which is the weighted sum; none for one head and the overall label."""
    centring: float = Field(0.0, ge=0)
    """Coefficient of the squared sum of a pair's two scores, beside the loss: it keeps scores near 0 on average
    (Eisenstein et al. 2023, equation 2)."""
    use_margin: bool = False
    """Subtract a pair's `margin`, where the data has one, from its score difference (Llama 2, equation 2)."""
    calibration_bins: int = Field(10, ge=2)
    """Equal-mass bins of the expected calibration error."""
    scale_responses: int = Field(512, ge=16)
    """SFT responses, on prompts of the calibration split, that the score's shift and scale are measured on."""
    probe_texts: int = Field(640, ge=2)
    """Chosen responses of the test split that tails (filler, flattery, ...) are probed on."""
    suites: dict[SuiteName, str] = unkeyed(default_factory=dict)
    """Files of pairs that others have judged, by a name of your own, which the trained model is evaluated on, as by
    `tether eval`. They are read and never trained on; the key holds their digests."""
    lora: AdapterConfig | None = None
    """Train a LoRA adapter (and the head) beside the frozen SFT model; null trains all of it."""
    refresh: RefreshConfig | None = None
    """Start from an earlier run's reward model, and say what changed on its test pairs; null starts from SFT."""

    @model_validator(mode="after")
    def _an_average_has_members(self) -> Self:
        if self.combine == "average" and self.members < 2:
            raise ValueError("combine=average averages the weights of several members: set members to 2 or more")
        if self.objectives and self.labels == "shares":
            raise ValueError("objectives are learned from their own shares of votes: leave labels out")
        return self

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the heads, in their order in the model; none where there is the one overall head."""
        return tuple(sorted(self.objectives))

    @property
    def published(self) -> int:
        """Reward models in the artifact."""
        return self.members if self.combine == "ensemble" else 1


class RewardJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    reward: RewardConfig


class JudgeConfig(Settings):
    """How an independent judge is trained where that differs from `reward`. It has no `reward.objectives`, `max_pairs`
    or `refresh`."""

    epochs: int | None = Field(None, ge=1)
    """Passes over its pairs; null: `reward.epochs`. It has fewer pairs than the reward model, so more passes help."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Peak learning rate; null: `reward.learning_rate`."""


class JudgeJob(Settings):
    """All that an independent judge depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    reward: RewardConfig
    judge: JudgeConfig = JudgeConfig()
    """How the judge of `data.judge_preferences` is trained."""

    @field_validator("reward", mode="after")
    @classmethod
    def _of_one_head(cls, reward: RewardConfig) -> RewardConfig:
        return reward.model_copy(update={"objectives": {}, "max_pairs": None, "refresh": None})

    def as_reward(self, seed: int) -> RewardJob:
        """The job of `reward` that trains the judge."""
        own = {name: value for name, value in self.judge.model_dump().items() if value is not None}
        reward = self.reward.model_copy(update=own)
        return RewardJob(seed=seed, runtime=self.runtime, generation=self.generation, reward=reward)


class JudgedJob(Settings):
    """What the reward model's scores of the pairs that people judge depend on, beside those."""

    seed: int
    """The run's seed (nothing is drawn)."""
    runtime: Runtime
    """The machine that scores."""
    generation: GenerationConfig
    """Its lengths, which prompts and responses are cut to."""
