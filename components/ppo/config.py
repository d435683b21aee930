"""Options of PPO and its KL penalty. Importable without torch."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from components.base.settings import Settings, keyed_if_set, unkeyed
from components.models.config import AdapterConfig, GenerationConfig
from components.models.runtime import Runtime
from components.ppo.alarm_table import MonitorName
from components.reward.config import EnsembleConfig
from components.rewards.config import RewardSource, RulesConfig, check_rewards
from components.rollouts.config import RolloutConfig
from components.training.optim import ObserverPlugin, OptimizerConfig

MINIMUM_REACH = 10.0
"""The smallest allowed factor by which an adaptive β can change over a run. With less it cannot reach a target."""
IN_GROUPS = ("rloo", "grpo")
"""The values of `ppo.advantage` that compare responses to one prompt."""
WITHOUT_CRITIC = (*IN_GROUPS, "reinforce++")
"""The values of `ppo.advantage` for which no value function is trained."""
BY_TOKEN = ("gae", "reinforce++")
"""The values of `ppo.advantage` that give each token its own advantage."""
OF_CRITIC_KIND = {"start": "separate", "learning_rate": "separate", "coefficient": "shared"}
"""Maps an option of the critic to the only kind of critic that uses it."""

KL_LIMITS = ("target", "band", "ceiling")
"""The options of `ppo.kl` whose values are in `unit`."""


class KLConfig(Settings):
    """The tether: a penalty on KL(policy || reference) that keeps the policy where the reward can be trusted."""

    form: Literal["reward", "k2", "k3"] = "reward"
    """`reward`: k1 in every token's reward, so that a token's advantage includes the KL of later tokens. `k2`: a loss
    on KL(policy || reference) in the visited states. `k3`: a loss on KL(reference || policy) there, as in GRPO."""
    control: Literal["fixed", "adaptive"] = "adaptive"
    """`fixed` keeps the coefficient; `adaptive` moves it until KL is at the target (Ziegler et al. 2019, section
    2.2)."""
    coefficient: float = Field(0.1, ge=0)
    """β at the start, in units of the SFT responses' score standard deviation per nat; with `advantage: grpo`, of the
    standard deviation of a group's scores per nat."""
    target: float = Field(6.0, gt=0)
    """The KL that the adaptive controller aims at, in `unit`."""
    band: float | None = Field(None, gt=0)
    """Upper end of the KL of policies that may be published, in `unit`; about twice the target. A checkpoint whose KL
    (the upper end of its interval) is above it is published only if no evaluated one is inside. If the KL of two
    batches in a row (the lower end of the interval) is above it, the run stops and fails. The gate `policy.kl` (or
    `policy.kl_per_token`) has it as its threshold unless `gates.policy` sets a lower one. Null: no band."""
    ceiling: float | None = Field(None, gt=0)
    """Training stops and fails above this KL, in `unit`: once KL is above it in five batches in a row, or one batch's
    KL (the lower end of its 95 % interval) is above three times it; null for none. Set it to twice the target or more:
    KL that swings around its target by 30 % (lag-1 autocorrelation 0.5) stays five batches in a row above 1.2 times the
    target in 46 % of runs of 100 updates, above 1.5 times in 3 %, and above twice in none of 1,000."""
    unit: Literal["response", "token"] = "response"
    """Whether `target`, `band` and `ceiling` are nats per response or nats per token."""
    horizon: float = Field(4.0, gt=0.2)
    """Horizon of the adaptive controller, in batches: the coefficient moves by at most 20 % / `horizon` per update. At
    0.2 or less it could fall to 0 or below."""
    proportional: float = Field(0.0, ge=0, le=5)
    """How strongly β also reacts to KL's current distance from the target (`adaptive` only); 0 for not at all. If KL
    follows β with a delay, the coefficient alone makes KL oscillate around the target, and this damps it (Stooke et al.
    2020, arXiv 2007.03964: the proportional part of a PID controller of a Lagrange multiplier). `coefficient` is then β
    at the target, and β starts at `coefficient` / exp(`proportional`), since KL starts at 0."""
    response_ceiling: float = Field(18.0, gt=0)
    """Nats. Responses whose KL to SFT (k1 summed over the tokens) is above this are counted in the final evaluation,
    for the gate `policy.kl_beyond_ceiling`: a mean hides a few prompts on which the policy is far from SFT. A single
    response swings more than a batch's mean, so set it to about six times the target."""
    refresh_every: int | None = Field(None, ge=1)
    """Number of updates after which the policy becomes the new reference; null keeps SFT. Only the penalty's reference
    is replaced: the KL that is logged, compared with the ceiling and gated stays the one to SFT."""

    @model_validator(mode="after")
    def _adapts_to_the_kl_that_it_controls(self) -> Self:
        if self.control == "adaptive" and self.refresh_every is not None:
            raise ValueError(
                "an adaptive coefficient controls KL to SFT, and a refreshed reference no longer pulls there: use "
                "kl.control=fixed (and kl.ceiling) with kl.refresh_every"
            )
        if self.control == "adaptive" and self.coefficient == 0:
            raise ValueError(
                "an adaptive coefficient that starts at 0 stays 0: use kl.control=fixed, or a coefficient > 0"
            )
        return self

    @property
    def measure(self) -> Literal["kl", "kl_per_token"]:
        """Return the name of KL in `unit`, without its group."""
        return "kl" if self.unit == "response" else "kl_per_token"

    def reach(self, updates: int) -> float:
        """Return the largest factor by which the adaptive coefficient can rise over `updates`."""
        return (1 + 0.2 / self.horizon) ** updates if math.log1p(0.2 / self.horizon) * updates < 700 else math.inf


class ScoreConfig(EnsembleConfig):
    """How the reward model's score, shifted and scaled to the SFT responses, becomes the reward of the last token."""

    clip: float = Field(5.0, gt=0)
    """Scaled scores are clipped to ± this, in SFT standard deviations."""
    missing_eos: Literal["replace", "subtract", "keep"] = "replace"
    """A response without EOS gets the SFT scores' first percentile (`replace`), loses `missing_eos_penalty`
    (`subtract`) or keeps its score."""
    missing_eos_penalty: float = Field(1.0, ge=0)
    """What `subtract` subtracts, in SFT standard deviations."""
    length_penalty: float = Field(0.0, ge=0)
    """Subtracted per response token, in SFT standard deviations."""

    @model_validator(mode="after")
    def _a_penalty_is_subtracted(self) -> Self:
        value, default = self.missing_eos_penalty, type(self).model_fields["missing_eos_penalty"].default
        if self.missing_eos != "subtract" and value != default:
            raise ValueError(
                f"missing_eos_penalty ({value:g}) is subtracted only with missing_eos=subtract: set that too, or leave "
                f"missing_eos_penalty out (its default is {default:g})"
            )
        return self


class CriticConfig(Settings):
    """The value function of `advantage: gae` and `sequence`."""

    kind: Literal["separate", "shared"] = "separate"
    """`separate`: its own model; `shared`: a linear head on the policy's trunk."""
    start: Literal["reward", "sft"] = "reward"
    """How a separate critic is initialised: from the reward model, or from the SFT policy with a head of zeros."""
    learning_rate: float | None = Field(None, gt=0, le=1)
    """Peak learning rate of a separate critic; null chooses one as for the policy."""
    coefficient: float = Field(0.5, gt=0)
    """Weight of the value loss added to the policy loss (`shared` only: a separate critic has its own optimiser)."""
    warmup: int = Field(0, ge=0)
    """Number of first updates, counted in `ppo.updates`, in which only the critic learns. Use it if the critic starts
    far from the returns, since its errors would otherwise move the policy (Yuan et al. 2025, arXiv 2503.01491,
    "value-pretraining"). The policy's learning-rate schedule begins after them."""
    clip_range: float | None = Field(None, gt=0)
    """Value clipping around the old values, in standard deviations of the returns; null for none."""


class ImportanceConfig(Settings):
    """Truncated importance weights, which correct an update if the sampler differs slightly from the trained policy.

    In bfloat16, and behind a server, the two give a token different probabilities. Each token of the policy loss, and
    of a KL loss, is weighted by w = min(π_old / π_sampler, `cap`)."""

    level: Literal["auto", "off", "token", "sequence"] = "auto"
    """`token`: one weight per token (Yao et al. 2025). `sequence`: the product of the response's weights, for all of
    its tokens; its variance grows with the length. `auto`: `token` if a server samples, else `off`. In float32 in this
    process the sampler's log-probabilities are the policy's, so all weights would be 1."""
    cap: float = Field(2.0, ge=1)
    """C, the largest weight (Ionides 2008)."""


class WatchConfig(Settings):
    """Held-out evaluations during training, and what they decide. `ppo.evaluate_every` sets how often they run."""

    prompts: int = Field(96, ge=2)
    """Number of prompts from the calibration split, on which no gate judges, at most `reward.scale_responses`; one
    response to each, with the same random numbers each time, so that checkpoints differ only by their weights."""
    patience: int | None = Field(None, ge=1)
    """Stop after this many evaluations in a row that did not raise the highest score inside the band. Such a stop is
    not a failure. Null: never. The score usually levels off long before β does, so this saves time, but the run then
    does not show what later updates would do."""


class PtxConfig(Settings):
    """An SFT loss added to the policy loss, so that the policy forgets less of the demonstrations: the γ term in the
    objective of Ouyang et al. 2022 (InstructGPT's PPO-ptx, arXiv 2203.02155, equation 2), here on the SFT data."""

    coefficient: float = Field(0.0, ge=0)
    """γ, per nat of the mean loss of a response token of the demonstrations; 0 for none."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations per optimiser step; overlong ones are left out."""


class MonitorConfig(Settings):
    """Monitors of every batch, with limits from SFT's own responses (docs/guide/training.md lists the alarms)."""

    responses: int | None = Field(256, ge=8)
    """Number of SFT responses, to prompts of the calibration split, from which the limits are computed, at most
    `reward.scale_responses`; null for no monitors."""
    stop_on: tuple[MonitorName, ...] = ()
    """Alarms that stop the run and fail it, as KL above the ceiling does; all others warn. Of the checkpoints that were
    evaluated before such an alarm, the one with the highest score inside the band is published."""

    @model_validator(mode="after")
    def _what_stops_is_watched(self) -> Self:
        if self.stop_on and self.responses is None:
            raise ValueError(
                "monitors.stop_on names alarms, and without monitors none is raised: set monitors.responses (256 by "
                "default), or empty monitors.stop_on"
            )
        return self


class RepeatsConfig(Settings):
    """Several responses of policy and SFT to a held-out prompt. The gate `policy.worse_prompts` judges a prompt's mean
    score, and `policy.kl_beyond_ceiling` every response. All other gates judge the first response to each prompt."""

    prompts: int = Field(256, ge=2)
    """Number of prompts that are answered several times: the first ones of the final evaluation."""
    samples: int = Field(4, ge=1)
    """Responses of each model to each of them, the first included. With fewer than 4, chance hides small falls."""


class PpoConfig(OptimizerConfig):
    """PPO (Schulman et al. 2017) for language models, after Ziegler et al. 2019 and Stiennon et al. 2020."""

    updates: int = Field(60, ge=1)
    """Number of updates, each on one batch of rollouts."""
    batch_size: int = Field(128, ge=2)
    """Responses per update, `group_size` to each prompt."""
    group_size: int = Field(1, ge=1)
    """Responses per prompt; `rloo` and `grpo` compare them, and need two or more."""
    max_prompts: int | None = Field(None, ge=1)
    """Train on this many prompts at most (the first ones, in data order); null for all."""
    balance: Literal["category"] | None = keyed_if_set(None)
    """`category`: each batch has as many prompts of each of the data's categories as of any other, or one more, and
    repeats none of a category before all of it were used. Null: prompts in the shares that they have in the data."""
    minibatch_size: int = Field(64, ge=1)
    """Responses per optimiser step."""
    micro_batch_size: int = Field(64, ge=1)
    """Responses per forward pass; gradients accumulate up to `minibatch_size`."""
    micro_batch_tokens: int | None = Field(None, ge=1)
    """Tokens per forward pass (prompts, responses and padding), instead of `micro_batch_size`. If lengths differ, a few
    long sequences then take about the same memory as many short ones. A sequence that exceeds it is computed alone.
    Null: use `micro_batch_size`."""
    epochs: int = Field(2, ge=1)
    """Passes over each batch; more than 4 warns."""
    advantage: Literal["gae", "sequence", "rloo", "grpo", "reinforce++"] = "gae"
    """The advantage estimator. `gae`: token by token, from the critic's values. `reinforce++`: a token's rewards to
    come, without a critic, whitened over the batch as those of `gae` are. The others give a response one advantage: its
    return minus the critic's value of the prompt (`sequence`), minus the mean return of the prompt's other responses
    (`rloo`), or its score minus its group's mean, divided by its group's deviation, with KL not divided (`grpo`).
    `rloo` and `grpo` have no critic. Only `grpo` does not converge to π_ref exp(score / β): see
    docs/decisions/learning.md."""
    ratio: Literal["token", "sequence"] = "token"
    """What the policy loss clips: each token's ratio π / π_old; or, of every token of a response, the geometric mean
    of its tokens' ratios (GSPO: Zheng et al. 2025, arXiv 2507.18071, equations 7 and 13). Such a mean is near 1, so
    clip it near 1: the paper's `clip_range` is 3e-4 and `clip_range_high` 4e-4, with `aggregation=sequence`."""
    pair_labels: Literal["soft", "hard"] | None = None
    """Only with `policy.method=online_dpo`: how it labels two responses to a prompt by their scores s and s'. `soft`,
    the default there: the probability σ(s - s') that the first is better, with which it comes to PPO's optimum; `hard`:
    1 for the higher score."""
    clip_range: float = Field(0.2, gt=0, lt=1)
    """ε of the clipped policy loss."""
    clip_range_high: float | None = Field(None, gt=0)
    """ε for ratios above 1; null takes `clip_range`. A larger one lets unlikely tokens gain more, which counters a fall
    of entropy (Yu et al. 2025, DAPO's clip-higher, arXiv 2503.14476, equation 10, with 0.2 and 0.28)."""
    dual_clip: float | None = Field(None, gt=1)
    """c of the dual clip: the policy loss of a token with negative advantage A is at most -c A, however large its
    ratio, and has no gradient beyond that (Ye et al. 2020, arXiv 1912.09729, equation 5, with 3); null for none. Use it
    if `ppo/ratio_max` shows a few tokens far above 1."""
    aggregation: Literal["token", "sequence", "cap"] = "token"
    """How the losses of a minibatch's tokens become one number. `token`: their mean, so that a long response weighs
    more (Yu et al. 2025, equation 12). `sequence`: the mean of the responses' means, so that a token of a long response
    weighs less (GRPO: Shao et al. 2024, equation 3). `cap`: their sum over responses times
    `generation.max_new_tokens`, so that every token weighs the same in every minibatch (Liu et al. 2025, Dr. GRPO,
    arXiv 2503.20783, section 3.2). Applies to policy, KL, entropy and value loss alike."""
    ema: float | None = Field(None, gt=0, lt=1)
    """Decay per update of an exponential moving average of the policy's weights; null for none. The average is
    evaluated and published instead of the last policy, which fluctuates from update to update (Polyak and Juditsky
    1992; the average is also WARP's, Ramé et al. 2024, arXiv 2406.16768, section 3.1, as the KL reference). Rollouts
    and β are those of the training policy. For a LoRA adapter the factors are averaged."""
    ptx: PtxConfig = PtxConfig()
    """An SFT loss added to the policy loss."""
    discount: float = Field(1.0, gt=0, le=1)
    """γ of the returns (`gae` and `reinforce++`: the advantage of a whole response is not discounted)."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """λ of generalised advantage estimation (`gae` only: with other estimators any value but the default is
    refused)."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of the entropy bonus, per nat of a token's entropy."""
    stop_epochs_above: float | None = Field(0.1, gt=0)
    """Skip the rest of an update once a minibatch's approximate KL to the old policy exceeds this, in nats per token;
    null: never."""
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
    """The team's own rules. Their violations in responses are counted, and the gate `policy.rule_violations_excess`
    compares the policy with SFT. They are part of the reward only by `rules.penalty`. Null: none."""
    critic: CriticConfig = CriticConfig()
    """The value function."""
    rollout: RolloutConfig = RolloutConfig()
    """Where rollouts are sampled."""
    importance: ImportanceConfig = ImportanceConfig()
    """Weights that correct for a sampler that differs slightly from the policy."""
    lora: AdapterConfig | None = None
    """Train a LoRA adapter of this shape as the policy. Policy, reference, critic and reward model then share one
    frozen backbone, and critic and reward model are adapters of `reward.lora`'s shape, which must be set too. Null
    trains whole models."""
    evaluate: int = Field(512, ge=2)
    """Number of held-out prompts in the final evaluation. Fewer than 256 are for trials only: intervals are wide, and
    the gate `policy.evaluated` fails."""
    repeats: RepeatsConfig = RepeatsConfig()
    """Further responses in the final evaluation."""
    evaluate_every: int | None = Field(4, ge=1)
    """Updates between evaluations on prompts of the calibration split. If they find a checkpoint that is certainly
    better than the last policy, or the last is outside `kl.band`, the best one is published. There are none
    during `critic.warmup`. Null: no such evaluations, and the last policy is published."""
    watch: WatchConfig = WatchConfig()
    """What the evaluations of `evaluate_every` use and decide."""
    monitors: MonitorConfig = MonitorConfig()
    """Monitors of every batch."""
    observers: tuple[ObserverPlugin, ...] = ()
    """Observers from installed packages (plug-ins of the group `tether.observers`), by name: each looks at every
    update, may add metrics and examples, and may stop the run."""
    stop_early: bool = True
    """Whether a run ends before its last update if KL is too high (`kl.ceiling`, `kl.band`), an alarm of
    `monitors.stop_on` is raised, an observer of `observers` stops it, or `watch.patience` is used up. False switches
    every stop off; all but the last still fail the gate `ppo.stopped`. The gate is off if none of them is set."""
    evaluate_temperature: float | None = Field(None, ge=0)
    """Temperature of the final evaluation's responses, for a model that will be used at a different temperature than
    that of training; 0 is greedy. KL and entropy are still measured at `generation.temperature`, on further responses,
    since training controls KL only there. Null uses that temperature for everything."""
    best_of: int | None = Field(None, ge=2)
    """Also evaluate a baseline: the best-scored of this many SFT responses to each held-out prompt; null for none."""
    sample_every: int = Field(20, ge=1)
    """Updates between entries of the table of samples."""
    checkpoint_every: int = unkeyed(10, ge=1)
    """Updates between checkpoints."""
    checkpoint_minutes: float | None = unkeyed(10.0, gt=0)
    """Also write a checkpoint when this many minutes have passed since the last one; null: count only updates."""

    @model_validator(mode="after")
    def _patience_counts_evaluations(self) -> Self:
        if self.watch.patience is not None and self.evaluate_every is None:
            raise ValueError("watch.patience counts evaluations, and there are none: set evaluate_every")
        return self

    @model_validator(mode="after")
    def _alarms_that_stop_are_measured(self) -> Self:
        if "unpaid_kl" in self.monitors.stop_on and not self.beta_prices_kl:
            raise ValueError(
                "monitors.stop_on names unpaid_kl, which is not measured with advantage=grpo, kl.refresh_every or "
                "kl.form=k3: β does not price KL to SFT there. Leave unpaid_kl out, and set kl.ceiling"
            )
        return self

    @model_validator(mode="after")
    def _plug_ins(self) -> Self:
        if self.rewards is not None:
            check_rewards(self.rewards)
        names = [observer.plugin for observer in self.observers]
        if len(set(names)) < len(names):
            raise ValueError(f"observers: a name appears twice in {', '.join(names)}. Name each plug-in once")
        return self

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        nested = ("batch_size", "minibatch_size"), ("minibatch_size", "micro_batch_size"), ("batch_size", "group_size")
        sizes = vars(self)
        for whole, part in nested:
            if sizes[whole] % sizes[part]:
                raise ValueError(f"{whole} ({sizes[whole]}) must be a multiple of {part} ({sizes[part]})")
        if self.in_groups and self.group_size < 2:
            raise ValueError(
                f"advantage={self.advantage} compares responses to one prompt: set group_size to 2 or more"
            )
        if self.advantage not in BY_TOKEN and self.discount != 1:
            raise ValueError(f"advantage={self.advantage} has no discount: set discount to 1 or use advantage=gae")
        if self.advantage != "gae" and self.gae_lambda != (default := type(self).model_fields["gae_lambda"].default):
            raise ValueError(
                f"gae_lambda ({self.gae_lambda:g}) is for advantage=gae, and advantage={self.advantage} ignores it: "
                f"leave it out (its default is {default:g}) or use advantage=gae"
            )
        if self.pair_labels is not None and (self.has_critic or self.group_size != 2 or self.minibatch_size % 2):
            raise ValueError(
                f"pair_labels={self.pair_labels} compares two responses to a prompt: set advantage to rloo, group_size "
                f"to 2 and minibatch_size ({self.minibatch_size}) to an even number"
            )
        if self.critic.warmup and not self.has_critic:
            raise ValueError(f"critic.warmup needs a critic, and advantage={self.advantage} has none: set it to 0")
        if self.critic.warmup >= self.updates:
            raise ValueError(
                f"critic.warmup ({self.critic.warmup}) leaves none of the {self.updates} updates to the policy: set it "
                "below updates"
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
        """Return the most responses and the most tokens of a forward pass. If tokens are given, only they count."""
        return self.micro_batch_size, self.micro_batch_tokens

    @property
    def importance_level(self) -> Literal["token", "sequence"] | None:
        """Return the level of the importance weights; None for none."""
        level = self.importance.level
        if level == "auto":
            return "token" if self.rollout.by_server else None
        return None if level == "off" else level

    @property
    def beta_prices_kl(self) -> bool:
        """Return whether β is in SFT deviations per nat of KL(policy || SFT), the KL that is evaluated.

        With `grpo` β is in a group's deviations, and with `refresh_every` it is of KL to another policy. k3 estimates
        KL(policy || SFT), but as a loss it has the gradient of KL(SFT || policy) (see `kl_loss`), so β is the price of
        the latter.
        """
        return self.advantage != "grpo" and self.kl.refresh_every is None and self.kl.form != "k3"

    def beta_in_deviations(self, beta: float) -> float | None:
        """Return β in SFT deviations per nat of KL(policy || SFT); None if it is in another unit or of another KL."""
        return beta if self.beta_prices_kl else None

    @property
    def can_break(self) -> bool:
        """Return whether anything can fail the gate `ppo.stopped`: a ceiling, a band, an alarm or an observer.

        The band is judged by the interval over a batch's prompts, which a batch with a single prompt does not have.
        """
        band = self.kl.band is not None and self.batch_size > self.group_size
        return self.kl.ceiling is not None or band or bool(self.monitors.stop_on or self.observers)

    @property
    def asked(self) -> list[RewardSource]:
        """Return what the first rank asks for scores, or for violations, while the others wait."""
        rules = None if self.rules is None else self.rules.caller
        return [*(self.rewards or ()), *([] if rules is None else [rules])]

    @property
    def together(self) -> int:
        """Return the number of consecutive responses that the loss compares."""
        return 1 if self.pair_labels is None else 2

    @property
    def has_critic(self) -> bool:
        """Return whether a value function is trained."""
        return self.advantage not in WITHOUT_CRITIC

    @property
    def in_groups(self) -> bool:
        """Return whether advantages compare the responses to one prompt."""
        return self.advantage in IN_GROUPS


class PpoJob(Settings):
    """Everything except the inputs on which the stage's output depends."""

    seed: int
    runtime: Runtime
    generation: GenerationConfig
    ppo: PpoConfig
