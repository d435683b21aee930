"""Every gate and every main metric, one per line."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

Op = Literal["<=", ">=", ">", "==", "between"]


@dataclass(frozen=True)
class Gate:
    """One rule for one final metric. Its threshold is not here: profiles hold the thresholds."""

    name: str
    """`stage.short`: the name that `--waive` takes, and the key below `gates` in a config."""
    op: Op
    """The comparison. Gains use `>`: if nothing changed, the interval has width 0, and a gain of 0 must fail."""
    description: str
    metric: str = ""
    """The metric `group/name` that is judged; empty means `stage/short`."""
    ends: bool = False
    """For `between`: both ends of the metric's interval, `<metric>_low` and `<metric>_high`, must lie within."""
    or_within: str | tuple[str, str] | None = None
    """A metric that replaces an upper threshold if it is larger (ECE's simulated null); for `between`, the two metrics
    of a second allowed range (the slope's simulated null)."""
    warn_only: bool = False
    """Shown and recorded, but never stops a run."""
    if_measured: bool = False
    """For a metric that not every run has: the gate is off if neither the metric nor its `estimate` is there. It fails
    on NaN, and on an estimate whose interval is unknown."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", self.metric or self.name.replace(".", "/", 1))

    @property
    def stage(self) -> str:
        """Return the stage that it judges."""
        return self.name.partition(".")[0]

    @property
    def estimate(self) -> str:
        """Return the metric of whose interval it judges an end (`ppo/kl` for `ppo/kl_high`); else its own metric."""
        return self.metric.removesuffix("_low").removesuffix("_high")

    @property
    def short(self) -> str:
        """Return its key below `gates.<stage>` in a config."""
        return self.name.partition(".")[2]


_GATES = (
    Gate("validate.contract", ">=", "every error-severity expectation of the suite holds", "data/contract"),
    Gate("validate.judge_contract", ">=", "every error-severity expectation holds on the judge's pairs",
         "data/judge_contract", if_measured=True),
    Gate("validate.judge_pairs", ">=", "enough of the judge's pairs are left after quarantine", "data/judge_pairs",
         if_measured=True),
    Gate("validate.pairs", ">=", "enough pairs are left after quarantine", "data/pairs"),
    Gate("validate.leaked_prompts", "<=", "no prompt is in two splits", "data/leaked_prompts"),
    Gate("validate.annotator_agreement", ">=", "annotators agree (Fleiss' kappa), lower end",
         "data/annotator_agreement_low"),
    Gate("validate.label_noise", "<=", "share of labels that are flipped, as estimated from the pairs, upper end",
         "data/label_noise_high"),
    Gate("sft.loss", "<=", "held-out loss, nats per response token, upper end", "sft/loss_high"),
    Gate("sft.perplexity_ratio", "<=", "held-out perplexity against the baseline's, upper end",
         "sft/perplexity_ratio_high"),
    Gate("sft.ended", ">=", "share of responses that end by themselves, lower end", "sft/ended_low"),
    Gate("reward.accuracy_low", ">=", "held-out accuracy, lower end of its interval"),
    Gate("reward.ece", "<=", "calibration error after temperature", or_within="reward/ece_null_95"),
    Gate("reward.calibration_slope", "between", "recalibration slope",
         or_within=("reward/slope_null_low", "reward/slope_null_high")),
    Gate("reward.temperature_at_end", "<=", "calibration pairs name a temperature: its fit met no end of the range"),
    Gate("reward.length_gain_low", ">", "accuracy above a length-only rule, lower end"),
    Gate("reward.invariance", "<=", "a text scores the same alone, in a batch and padded"),
    Gate("reward.ece_width", "<=", "the same in bins of equal width", or_within="reward/ece_width_null_95"),
    Gate("reward.slice_accuracy_low", ">=", "accuracy in the worst slice, lower end"),
    Gate("reward.slice_ece_excess", "<=", "worst slice's calibration error above chance"),
    Gate("reward.majority_gain_low", ">", "accuracy above always naming the side that won more often, lower end"),
    Gate("reward.probe_texts", ">=", "texts that the rise in score is measured on"),
    Gate("reward.balanced_length_accuracy_low", ">=", "mean accuracy where the longer and the shorter won, lower end"),
    Gate("reward.disagreement_auroc_low", ">=", "an ensemble disagrees more on soup than on SFT samples, lower end"),
    Gate("reward.judge_accuracy_low", ">=", "the judge's held-out accuracy, lower end of its interval",
         if_measured=True),
    Gate("reward.judge_ece", "<=", "the judge's calibration error after temperature",
         or_within="reward/judge_ece_null_95", if_measured=True),
    Gate("reward.judge_calibration_slope", "between", "the judge's recalibration slope",
         or_within=("reward/judge_slope_null_low", "reward/judge_slope_null_high"), if_measured=True),
    Gate("reward.judge_length_gain_low", ">", "the judge's accuracy above a length-only rule, lower end",
         if_measured=True),
    Gate("reward.refresh_gain_low", ">=", "accuracy on old pairs above the old model's, lower end", if_measured=True),
    Gate("reward.suite_accuracy_low", ">=", "accuracy on every suite of reward.suites, lower end", if_measured=True),
    Gate("reward.brier_high", "<=", "Brier score after temperature, upper end"),
    Gate("reward.log_loss_high", "<=", "log loss after temperature, nats a pair, upper end"),
    Gate("reward.length_partial_correlation_high", "<=", "correlation of score and length given the label, upper end"),
    Gate("reward.position_invariance", "<=", "a text scores the same wherever it stands in a batch"),
    Gate("reward.probe_filler_high", "<=", "rise in score by a filler sentence, SFT deviations, upper end"),
    Gate("reward.probe_flattery_high", "<=", "rise in score by a flattering sentence, SFT deviations, upper end"),
    Gate("reward.probe_hedge_high", "<=", "rise in score by a hedging sentence, SFT deviations, upper end"),
    Gate("reward.probe_repetition_high", "<=", "rise in score by a repeated last sentence, SFT deviations, upper end"),
    Gate("reward.probe_whitespace_high", "<=", "rise in score by white space at the end, SFT deviations, upper end"),
    Gate("reward.probe_exclamations_high", "<=", "rise in score by !!! at the end, SFT deviations, upper end"),
    Gate("reward.probe_dots_high", "<=", "rise in score by ... at the end, SFT deviations, upper end"),
    Gate("ppo.kl", "<=", "held-out KL to SFT, nats per response, upper end", "ppo/kl_high"),
    Gate("ppo.kl_per_token", "<=", "held-out KL to SFT, nats per token, upper end", "ppo/kl_per_token_high"),
    Gate("ppo.kl_floor", ">=", "the policy has moved away from SFT, lower end of KL", "ppo/kl_low", warn_only=True),
    Gate("ppo.stopped", "<=", "the tether held: KL stayed below its ceiling and in its band in every update",
         if_measured=True),
    Gate("ppo.beta_drift_below_target", "<=", "log β had settled, or KL was not below its target, in the last third",
         warn_only=True, if_measured=True),
    Gate("ppo.proxy_rise_at_level_kl", "<=", "proxy reward does not climb while KL stays level, SFT deviations",
         warn_only=True, if_measured=True),
    Gate("ppo.ratio_max", "<=", "largest ratio of a token's probability to the old policy's", warn_only=True),
    Gate("ppo.clip_fraction_max", "<=", "no update had most of its tokens at the clip", warn_only=True),
    Gate("ppo.replaced_max", "<=", "no five updates in a row had most of their scores replaced for a missing EOS",
         if_measured=True),
    Gate("ppo.score_spread_min", ">", "smallest spread of scores within an update, SFT deviations"),
    Gate("ppo.evaluated", ">=", "held-out prompts that PPO's gates are measured on"),
    Gate("ppo.reward_gain_low", ">", "gain in the reward model's score over SFT on held-out prompts, lower end"),
    Gate("ppo.worse_prompts", "<=", "share of prompts whose mean score falls, less what two draws of SFT give, upper "
         "end", "ppo/worse_prompts_excess_high"),
    Gate("ppo.kl_beyond_ceiling", "<=", "share of held-out responses whose KL to SFT is above ppo.kl.response_ceiling, "
         "upper end", "ppo/kl_beyond_ceiling_high"),
    Gate("ppo.demonstration_perplexity_ratio", "<=", "perplexity of demonstrations against SFT's (capability kept), "
         "upper end", "ppo/demonstration_perplexity_ratio_high"),
    Gate("ppo.repetition", "<=", "repetition in responses, upper end", "ppo/repetition_high"),
    Gate("ppo.echo", "<=", "responses that repeat the prompt back, upper end", "ppo/echo_high"),
    Gate("ppo.distinct", ">=", "distinct 4-grams of all responses against SFT's, lower end", "ppo/distinct_ratio_low"),
    Gate("ppo.dissimilarity", ">=", "difference between responses to two prompts, against SFT's, lower end",
         "ppo/dissimilarity_ratio_low"),
    Gate("ppo.entropy_ratio", ">=", "entropy a token against SFT's, lower end", "ppo/entropy_ratio_low"),
    Gate("ppo.length_ratio", "between", "response length against SFT's, both ends", ends=True),
    Gate("ppo.ended", ">=", "share of responses that end by themselves, lower end", "ppo/ended_low"),
    Gate("ppo.special_tokens", "<=", "responses with a special token before their end, upper end",
         "ppo/special_tokens_high"),
    Gate("ppo.violations_excess", "<=", "policy violations above SFT's (built-in task), upper end",
         "ppo/violations_excess_high"),
    Gate("ppo.rule_violations_excess", "<=", "violations of ppo.rules above SFT's, a response, upper end",
         "ppo/rule_violations_excess_high", if_measured=True),
    Gate("ppo.judge_gain_low", ">", "gain over SFT by every judge, none of which ever rewarded, lower end",
         if_measured=True),
    Gate("human_eval.labels_complete", ">=", "share of the ratings asked for that were given"),
    Gate("human_eval.items", ">=", "enough rated items"),
    Gate("human_eval.fleiss_kappa", ">=", "judges agree (Fleiss' kappa), lower end", "human_eval/fleiss_kappa_low"),
    Gate("human_eval.position_bias", "<=", "distance from 1/2 of raters who certainly prefer a side, upper end",
         "human_eval/position_bias_high"),
    Gate("human_eval.self_agreement_low", ">=", "raters answer repeated items alike, lower end"),
    Gate("human_eval.raters_alike", "<=", "share of equal answers of two raters who certainly copy, else of all pairs",
         if_measured=True),
    Gate("human_eval.attention_low", ">=", "right answers of raters who answer as if at random, lower end",
         if_measured=True),
    Gate("human_eval.win_rate_low", ">=", "win rate against SFT, lower end over prompts and raters"),
    Gate("human_eval.reward_agreement_low", ">", "reward model prefers what the judges prefer, lower end"),
    Gate("human_eval.reward_ece", "<=", "reward model's calibration error on the judged pairs",
         or_within="human_eval/reward_ece_null_95"),
)  # fmt: skip

GATES = {gate.name: gate for gate in _GATES}
"""Every gate by name, in the order in which they are shown."""


class MainMetric(NamedTuple):
    """A metric that people look at first."""

    name: str
    """`group/name`."""
    words: str
    unit: str = ""
    brief: bool = False
    """Whether the terminal and MLflow's note of a run show it; they show only a few metrics."""
    card: bool = True
    """Whether a model's card shows it."""

    @property
    def text(self) -> str:
        """Return its description with unit."""
        return f"{self.words}, {self.unit}" if self.unit else self.words


MAIN_METRICS: dict[str, tuple[MainMetric, ...]] = {
    "validate": (
        MainMetric("data/pairs", "pairs that are left", brief=True, card=False),
        MainMetric("data/quarantined", "rows kept out", brief=True, card=False),
        MainMetric("data/overlong", "share of pairs with a response that is cut", card=False),
        MainMetric("data/label_noise", "share of labels that are flipped, as estimated", card=False),
        MainMetric("data/model_votes", "share of the votes that models cast", brief=True, card=False),
        MainMetric("data/annotator_agreement", "agreement of the annotators (Fleiss' kappa)", brief=True, card=False),
    ),
    "sft": (
        MainMetric("sft/loss", "held-out loss", "nats a token", brief=True),
        MainMetric("sft/perplexity", "held-out perplexity", brief=True),
        MainMetric("sft/ended", "share of responses that end"),
        MainMetric("sft/overlong", "share of demonstrations over the response cap"),
        MainMetric("sft/gold", "simulated gold score", brief=True),
        MainMetric("sft/violations", "simulated policy violations", "a response", brief=True),
    ),
    "reward": (
        MainMetric("reward/accuracy", "held-out accuracy", brief=True),
        MainMetric("reward/accuracy_low", "held-out accuracy, lower end of its interval", brief=True, card=False),
        MainMetric("reward/ece", "expected calibration error, after temperature", brief=True),
        MainMetric("reward/calibration_slope", "recalibration slope"),
        MainMetric("reward/brier", "Brier score"),
        MainMetric("reward/length_accuracy", "accuracy of length alone"),
        MainMetric("reward/test_pairs", "held-out pairs", brief=True, card=False),
        MainMetric("reward/judge_accuracy", "the judge's held-out accuracy", brief=True),
        MainMetric("reward/judge_ece", "the judge's expected calibration error, after temperature"),
    ),
    "ppo": (
        MainMetric("ppo/proxy_reward", "reward model's scaled score of the policy", brief=True, card=False),
        MainMetric("ppo/kl", "KL to the SFT model", "nats a response", brief=True),
        MainMetric("ppo/kl_per_token", "KL to the SFT model", "nats a token", brief=True),
        MainMetric("ppo/reward_gain", "reward model's score over the SFT model's", "in its standard deviations"),
        MainMetric("ppo/worse_prompts", "share of prompts whose mean score is below the SFT model's"),
        MainMetric("ppo/kl_beyond_ceiling", "share of responses whose KL is above ppo.kl.response_ceiling"),
        MainMetric("ppo/reward_gain_ended", "the same where both responses ended", "in its standard deviations"),
        MainMetric(
            "ppo/judge_gain",
            "score over the SFT model's by the strictest judge",
            "in its standard deviations",
            brief=True,
        ),
        MainMetric("ppo/entropy", "entropy", "nats a token"),
        MainMetric("ppo/response_tokens", "tokens", "a response"),
        MainMetric("ppo/ended", "share of responses that end"),
        MainMetric("ppo/gold", "simulated gold score", brief=True),
        MainMetric("ppo/violations", "simulated policy violations", "a response", brief=True),
        MainMetric("ppo/rule_violations", "violations of the team's rules", "a response", brief=True),
        MainMetric("ppo/rule_violations_excess", "violations of the team's rules above the SFT model's", "a response"),
    ),
    "human_eval": (
        MainMetric("human_eval/win_rate", "win rate against the SFT model, ties a half", brief=True),
        MainMetric("human_eval/win_rate_low", "win rate, lower end of its interval", brief=True, card=False),
        MainMetric("human_eval/always_valid_low", "lower bound that holds at every look, of these raters", card=False),
        MainMetric(
            "human_eval/always_valid_low_of_people", "lower bound that holds at every look, of all people", card=False
        ),
        MainMetric("human_eval/raters", "raters", card=False),
        MainMetric("human_eval/win_rate_equal_length", "win rate at equal length"),
        MainMetric("human_eval/reward_agreement", "reward model's agreement with the judges", brief=True),
        MainMetric("human_eval/reward_auroc", "AUROC of the reward model's gain on these pairs", card=False),
        MainMetric("human_eval/both_bad", "share of ratings `both_bad`"),
        MainMetric("human_eval/fleiss_kappa", "agreement of the raters (Fleiss' kappa)", brief=True),
    ),
}
"""The metrics that people look at first, by stage, in the order in which they are shown."""


OF_SOURCE = "_from/"
"""The separator between a metric's name and the label of a source, as in `data/pairs_from/a.jsonl`."""


def brief_metrics(stage: str, recorded: Iterable[str]) -> list[str]:
    """Return the names of a stage's few recorded metrics that fit into a line.

    A metric that is also recorded by source (`data/pairs_from/LABEL`) is followed by these. For a stage that is not in
    the table, return its first metrics.
    """
    names = list(recorded)
    if stage in MAIN_METRICS:
        brief = [metric.name for metric in MAIN_METRICS[stage] if metric.brief and metric.name in names]
        by_source = {name: sorted(each for each in names if each.startswith(f"{name}{OF_SOURCE}")) for name in brief}
        return [each for name in brief for each in (name, *by_source[name])]
    return sorted(name for name in names if name.startswith(f"{stage}/"))[:4]
