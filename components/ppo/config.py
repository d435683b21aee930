"""Options of PPO and its KL tether. Importable without torch."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings, unkeyed
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime
from components.reward.config import EnsembleConfig
from components.rewards.config import RewardSource, RulesConfig, check_rewards
from components.rollouts.config import RolloutConfig
from components.training.optim import OptimizerConfig

MINIMUM_REACH = 10.0
"""An adaptive controller whose coefficient can't change by this factor over the run can't hold a target."""


class KLConfig(Settings):
    """The tether: what holds KL(policy || reference) where the reward can be believed."""

    form: Literal["reward", "k2", "k3"] = "reward"
    """`reward`: k1 in every token's reward, so that a token answers for the KL of those after it too. `k2`: a loss on
    KL(policy || reference) in the states visited. `k3`: a loss on KL(reference || policy) there, as in GRPO."""
    control: Literal["fixed", "adaptive"] = "adaptive"
    """`fixed` keeps the coefficient; `adaptive` moves it until KL is at the target (Ziegler et al. 2019, 2.2)."""
    coefficient: float = Field(0.1, ge=0)
    """β at the start, in units of the SFT responses' score standard deviation per nat; with `advantage: grpo`, of the
    standard deviation of a group's scores per nat."""
    target: float = Field(6.0, gt=0)
    """KL the adaptive controller aims at, in `unit`."""
    unit: Literal["response", "token"] = "response"
    """Whether `target` and `stop_above` are nats per response or nats per token."""
    horizon: float = Field(4.0, gt=0.2)
    """Horizon of the adaptive controller, in batches: the coefficient moves by at most 20 % / `horizon` an update, and
    at a horizon of 0.2 or less could fall to 0 or below."""
    proportional: float = Field(0.0, ge=0, le=5)
    """How strongly β also reacts to KL's present distance from the target (`adaptive` only); 0 for not at all. Where KL
    follows β late, the moves that the horizon adds up would alone swing around the target (Stooke et al. 2020, arXiv
    2007.03964: the proportional part of a PID controller of a Lagrange multiplier). `coefficient` is then β at the
    target, and β starts at `coefficient` / exp(`proportional`), since KL starts at 0."""
    stop_above: float | None = Field(None, gt=0)
    """Hard ceiling, in `unit`; null for none. The run stops, as failed, once KL was above it in five batches in a row,
    or for certain above three times it in one."""
    refresh_every: int | None = Field(None, ge=1)
    """Make the policy the new reference every so many updates; null keeps SFT. Only what β pulls towards is refreshed:
    the KL that is logged, held under the ceiling and gated stays that to SFT."""

    @model_validator(mode="after")
    def _ceiling_above_target(self) -> Self:
        if self.control == "adaptive" and self.refresh_every is not None:
            raise ValueError(
                "an adaptive coefficient controls KL to SFT, and a refreshed reference no longer pulls there: use "
                "kl.control=fixed (and kl.stop_above) with kl.refresh_every"
            )
        if self.control == "adaptive" and self.coefficient == 0:
            raise ValueError(
                "an adaptive coefficient that starts at 0 stays 0: use kl.control=fixed, or a coefficient > 0"
            )
        if self.control == "adaptive" and self.stop_above is not None and self.stop_above <= self.target:
            raise ValueError(f"stop_above ({self.stop_above}) must be greater than target ({self.target})")
        return self

    def reach(self, updates: int) -> float:
        """The factor by which the adaptive coefficient can rise over `updates`."""
        return (1 + 0.2 / self.horizon) ** updates if math.log1p(0.2 / self.horizon) * updates < 700 else math.inf


class ScoreConfig(EnsembleConfig):
    """From the reward model's score (shifted and scaled to the SFT responses) to the reward of the last token."""

    clip: float = Field(5.0, gt=0)
    """Scaled scores are clipped to ± this, in SFT standard deviations."""
    missing_eos: Literal["replace", "subtract", "keep"] = "replace"
    """A response without EOS gets the SFT scores' first percentile, loses `missing_eos_penalty`, or keeps its score."""
    missing_eos_penalty: float = Field(1.0, ge=0)
    """What `subtract` takes off, in SFT standard deviations."""
    length_penalty: float = Field(0.0, ge=0)
    """Taken off per response token, in SFT standard deviations."""
    length_buffer: int | None = Field(None, ge=1)
    """Where responses grow into the cap: tokens before `generation.max_new_tokens` over which a penalty rises linearly
    from 0 to `length_buffer_penalty`, the soft overlong punishment of Yu et al. 2025 (DAPO, arXiv 2503.14476, equation
    13); null for none."""
    length_buffer_penalty: float = Field(1.0, gt=0)
    """What `length_buffer` takes off at the cap, in SFT standard deviations."""


class CriticConfig(Settings):
    """The value function of `advantage: gae` and `sequence`."""

    kind: Literal["separate", "shared"] = "separate"
    """`separate`: a model of its own; `shared`: a linear head on the policy's trunk."""
    start: Literal["reward", "sft"] = "reward"
    """What a separate critic starts as: the reward model, or the SFT policy's trunk with a head of zeros."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Peak learning rate of a separate critic; null chooses one as for the policy."""
    coefficient: float = Field(0.5, gt=0)
    """Weight of the value loss beside the policy loss (`shared` only: a separate critic has its own optimiser)."""
    warmup: int = Field(0, ge=0)
    """Updates at the start, counted in `ppo.updates`, in which only the critic learns: for a critic that begins far
    from the returns, whose errors would otherwise move the policy (Yuan et al. 2025, arXiv 2503.01491,
    "value-pretraining"). The policy's learning rate begins its schedule after them."""
    clip_range: float | None = Field(None, gt=0)
    """Value clipping around the old values, in standard deviations of the returns; null for none."""


class ImportanceConfig(Settings):
    """Truncated importance weights: what corrects an update where the sampler is not quite the policy that trains.

    In bfloat16 and behind a server the two give a token other probabilities. Each token of the policy loss, and of a KL
    loss, is weighed with w = min(π_old / π_sampler, `cap`)."""

    level: Literal["auto", "off", "token", "sequence"] = "auto"
    """`token`: a weight a token (Yao et al. 2025). `sequence`: the product over a response, for all of its tokens; its
    variance grows with the length. `auto`: `token` where a server samples, else `off`. In float32 in this process the
    sampler's log-probabilities are the policy's, and there is nothing to weigh."""
    cap: float = Field(2.0, ge=1)
    """C that weights are cut to (Ionides 2008)."""


class WatchConfig(Settings):
    """The held-out evaluations while a policy trains, and what they decide. `ppo.evaluate_every` says how often."""

    prompts: int = Field(96, ge=2)
    """Prompts of the calibration split, which no gate judges anything on; one response to each."""
    kl_high: float | None = Field(None, gt=0)
    """Upper end of the band that KL to SFT should stay in, in `kl.unit`; set it to the threshold of the gate on KL. A
    checkpoint whose KL's upper end is above it is published only if no evaluated one is inside. When the KL of two
    batches in a row is certainly above it, the tether is broken: the run stops, and fails. Null: no band."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row that did not raise the highest score inside the band. Such a stop is
    not a failure. Null: never. A tethered policy's score levels off long before β does, so this saves time, but hides
    what the late updates would show."""


class PtxConfig(Settings):
    """An SFT loss beside the policy loss, so that the policy forgets less of the demonstrations: the term in γ of the
    objective of Ouyang et al. 2022 (InstructGPT's PPO-ptx, arXiv 2203.02155, equation 2), here on the SFT data."""

    coefficient: float = Field(0.0, ge=0)
    """γ, per nat of the mean loss of a response token of the demonstrations; 0 for none."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations an optimiser step; overlong ones are left out."""


MonitorName = Literal[
    "length", "nll", "repetition", "echo", "special_token", "rare_token", "flattery", "hedge", "filler",
    "overconfidence", "refusal", "agreement", "role_mark", "template", "length_score", "entropy", "distinct",
    "unpaid_kl",
]  # fmt: skip
"""Names of the alarms of components/ppo/monitors/alarms.py."""


class MonitorConfig(Settings):
    """What is watched in every batch, with limits from SFT's own responses (docs/guide/training.md has each alarm)."""

    responses: int | None = Field(256, ge=8)
    """SFT responses, to prompts of the calibration split, that the limits come from; null for no monitors."""
    false_alarms: float = Field(0.01, gt=0, lt=1)
    """Highest chance that a policy within the monitors' margins of SFT raises any alarm in the whole run."""
    stop_on: tuple[MonitorName, ...] = ()
    """Alarms that stop the run and fail it, as a broken tether does; all others warn. The best checkpoint is published
    whatever stopped the run."""

    @model_validator(mode="after")
    def _what_stops_is_watched(self) -> Self:
        if self.stop_on and self.responses is None:
            raise ValueError(
                "monitors.stop_on names alarms, and without monitors none is raised: set monitors.responses (256 by "
                "default), or empty monitors.stop_on"
            )
        return self


class PpoConfig(OptimizerConfig):
    """PPO (Schulman et al. 2017) for language models, after Ziegler et al. 2019 and Stiennon et al. 2020."""

    updates: int = Field(60, ge=1)
    """Batches of rollouts."""
    batch_size: int = Field(128, ge=2)
    """Responses an update, `group_size` to a prompt."""
    group_size: int = Field(1, ge=1)
    """Responses a prompt; `rloo` and `grpo` compare them, and need two or more."""
    minibatch_size: int = Field(64, ge=1)
    """Responses an optimiser step."""
    micro_batch_size: int = Field(64, ge=1)
    """Responses a forward pass; gradients accumulate up to `minibatch_size`."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens a forward pass (prompts, responses and padding), in place of `micro_batch_size`: where lengths differ, few
    long sequences or many short ones then take about the same memory. A sequence that exceeds it is computed alone;
    null counts responses."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch; more than 4 warns."""
    advantage: Literal["gae", "sequence", "rloo", "grpo"] = "gae"
    """What an action is compared with. `gae`: the critic's value of its state, token by token. The rest give a response
    one advantage: its return less the critic's value of the prompt (`sequence`), less the mean return of the prompt's
    other responses (`rloo`), or its score less its group's mean and over its group's deviation, with KL undivided
    (`grpo`). The last two have no critic. `grpo` alone does not lead to π_ref exp(score / β): see docs/decisions.md."""
    clip_range: float = Field(0.2, gt=0, lt=1)
    """ε of the clipped policy loss."""
    clip_range_high: float | None = Field(None, gt=0)
    """ε for ratios above 1, where it differs from the one below: a larger one lets unlikely tokens gain more, against a
    fall of entropy (Yu et al. 2025, DAPO's clip-higher, arXiv 2503.14476, equation 10, with 0.2 and 0.28); null takes
    `clip_range`."""
    dual_clip: float | None = Field(None, gt=1)
    """c of the dual clip: the policy loss of a token of negative advantage A stays at most -c A, however large its
    ratio, and beyond gives no gradient (Ye et al. 2020, arXiv 1912.09729, equation 5, with 3); null for none. For runs
    whose `ppo/ratio_max` shows a few tokens far above 1."""
    aggregation: Literal["token", "sequence", "cap"] = "token"
    """How the losses of a minibatch's tokens become one number. `token`: their mean, so that a long response weighs
    more (Yu et al. 2025, equation 12). `sequence`: the mean of the responses' means, so that a token of a long response
    weighs less (GRPO: Shao et al. 2024, equation 3). `cap`: their sum over responses times
    `generation.max_new_tokens`, so that every token weighs the same in every minibatch (Liu et al. 2025, Dr. GRPO,
    arXiv 2503.20783, section 3.2). It holds for policy, KL, entropy and value loss alike."""
    mask_truncated: bool = False
    """Leave responses that met the cap without EOS out of all losses: their reward is that of a text cut short (Yu et
    al. 2025, overlong filtering, arXiv 2503.14476, section 3.4). They still count in a group's mean."""
    mask_tied_groups: bool = False
    """Leave groups whose scores are all equal out of the loss (`rloo` and `grpo` only): they rank nothing, and only
    pull at the tether and shrink the mean (Yu et al. 2025, dynamic sampling, arXiv 2503.14476, equation 11, without its
    drawing of other prompts in their place)."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per update of an exponential moving average of the policy's weights. The average is evaluated and published
    in place of the last policy, which swings from update to update (Polyak and Juditsky 1992; Ramé et al. 2024, WARP,
    arXiv 2406.16768, section 3.1). Rollouts and β are the training policy's own. A LoRA adapter's factors are averaged.
    Null for none."""
    ptx: PtxConfig = PtxConfig()
    """An SFT loss beside the policy loss."""
    discount: float = Field(1.0, gt=0, le=1)
    """γ of the returns (`gae` only: an advantage of a whole response has none)."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation (`gae` only: another value than the default is refused elsewhere)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, per nat per token."""
    stop_epochs_above: float | None = Field(0.1, gt=0)
    """Skip the rest of an update once a minibatch's approximate KL to the old policy exceeds this, nats per token."""
    kl: KLConfig = KLConfig()
    """The tether to the SFT policy."""
    score: ScoreConfig = ScoreConfig()
    """The reward of a response."""
    rewards: tuple[RewardSource, ...] | None = None
    """Sources of reward, as `[{source: pipeline}, {source: function:my_rewards:brief, weight: 0.3}]`: `pipeline`,
    `model:FOLDER_OR_HUB_ID`, `function:MODULE:NAME`, `plugin:NAME`, `http:URL`, `verifier:NAME`. The reward is the
    sum of their scores, each shifted and scaled to SFT responses and weighted. Null: the pipeline's own reward model
    alone."""
    rules: RulesConfig | None = None
    """The team's own policy, whose violations are counted in responses; the gate `ppo.rule_violations_excess` compares
    the policy with SFT. They are no reward. Null: none."""
    critic: CriticConfig = CriticConfig()
    """The value function."""
    rollout: RolloutConfig = RolloutConfig()
    """Where rollouts are sampled."""
    importance: ImportanceConfig = ImportanceConfig()
    """Weights for a sampler that is not quite the policy."""
    lora: AdapterConfig | None = None
    """Policy, reference, critic and reward model share one frozen backbone, the policy a LoRA adapter of this shape
    (critic and reward model: of `reward.lora`'s, which must be set too); null trains whole models."""
    evaluate: int = Field(512, ge=2)
    """Held-out prompts of the final evaluation. Fewer than 256 are for trials: intervals are wide, and the gate
    `ppo.evaluated` says so."""
    evaluate_every: int | None = Field(4, ge=1)
    """Updates between evaluations on prompts of the calibration split; the best checkpoint that they find is published.
    Null: no evaluation, and the last policy is published."""
    watch: WatchConfig = WatchConfig()
    """These evaluations."""
    monitors: MonitorConfig = MonitorConfig()
    """What is watched in every batch."""
    stop_early: bool = True
    """Whether a run ends before its last update where its tether breaks (`kl.stop_above`, `watch.kl_high`), an alarm of
    `monitors.stop_on` is raised or `watch.patience` ends. False switches every stop off; a broken tether, and such an
    alarm, fail the gate `ppo.stopped` all the same."""
    evaluate_temperature: float | None = Field(None, ge=0)
    """Temperature of the final evaluation's responses, for a model that will be used at another temperature than it
    trains at; 0 is greedy. KL and entropy are still measured at `generation.temperature`, on further responses, since β
    holds KL only there. Null uses that temperature for everything."""
    best_of: int | None = Field(None, ge=2)
    """Also evaluate, as a baseline, the best-scored of so many SFT responses to each held-out prompt; null for none."""
    sample_every: int = Field(20, ge=1)
    """Updates between entries of the table of samples."""
    checkpoint_every: int = unkeyed(10, ge=1)
    """Updates between checkpoints."""
    checkpoint_minutes: float | None = unkeyed(10.0, gt=0)
    """Minutes between checkpoints, where they pass before so many updates; null for updates alone."""

    @model_validator(mode="after")
    def _band_holds_the_target(self) -> Self:
        most = self.watch.kl_high
        if self.kl.control == "adaptive" and most is not None and most <= self.kl.target:
            raise ValueError(
                f"watch.kl_high ({most:g}) must be greater than kl.target ({self.kl.target:g}): else the tether itself "
                "pulls KL out of its band. Set ppo.watch.kl_high and the gate on KL to about twice the target"
            )
        if self.watch.patience is not None and self.evaluate_every is None:
            raise ValueError("watch.patience counts evaluations, and there are none: set evaluate_every")
        return self

    @model_validator(mode="after")
    def _rewards(self) -> Self:
        if self.rewards is not None:
            check_rewards(self.rewards)
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        nested = ("batch_size", "minibatch_size"), ("minibatch_size", "micro_batch_size"), ("batch_size", "group_size")
        sizes = vars(self)
        for whole, part in nested:
            if sizes[whole] % sizes[part]:
                raise ValueError(f"{whole} ({sizes[whole]}) must be a multiple of {part} ({sizes[part]})")
        if not self.has_critic and self.group_size < 2:
            raise ValueError(
                f"advantage={self.advantage} compares responses to one prompt: set group_size to 2 or more"
            )
        if self.advantage != "gae" and self.discount != 1:
            raise ValueError(f"advantage={self.advantage} has no discount: set discount to 1 or use advantage=gae")
        if self.advantage != "gae" and self.gae_lambda != (default := type(self).model_fields["gae_lambda"].default):
            raise ValueError(
                f"gae_lambda ({self.gae_lambda:g}) is for advantage=gae, and advantage={self.advantage} ignores it: "
                f"leave it out (its default is {default:g}) or use advantage=gae"
            )
        if self.critic.warmup and not self.has_critic:
            raise ValueError(f"critic.warmup needs a critic, and advantage={self.advantage} has none: set it to 0")
        if self.critic.warmup >= self.updates:
            raise ValueError(
                f"critic.warmup ({self.critic.warmup}) leaves none of the {self.updates} updates to the policy: set it "
                "below updates"
            )
        if self.mask_tied_groups and self.has_critic:
            raise ValueError(
                f"mask_tied_groups is for advantages within groups (rloo, grpo): advantage={self.advantage} compares a "
                "response with the critic's value and has no groups"
            )
        reach = self.kl.reach(self.updates - self.critic.warmup)
        if self.kl.control == "adaptive" and reach < MINIMUM_REACH:
            raise ValueError(
                f"over {self.updates} updates the adaptive coefficient can change by a factor of {reach:.1f} only, "
                f"less than {MINIMUM_REACH:.0f}: lower kl.horizon (now {self.kl.horizon:g} batches) or use "
                "kl.control=fixed"
            )
        return self

    @property
    def micro_batch(self) -> tuple[int, int | None]:
        """Most responses of a forward pass, and most tokens: where those are given, they alone count."""
        return self.micro_batch_size, self.micro_batch_tokens

    @property
    def importance_level(self) -> Literal["token", "sequence"] | None:
        """The level of the importance weights; None for none."""
        level = self.importance.level
        if level == "auto":
            return "token" if self.rollout.by_server else None
        return None if level == "off" else level

    @property
    def has_critic(self) -> bool:
        """Whether a value function is trained."""
        return self.advantage in ("gae", "sequence")


class PpoJob(Settings):
    """All that the stage's output depends on, beside its inputs."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    ppo: PpoConfig
