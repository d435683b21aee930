"""Every gate by name, and the main metrics, one per line."""

from collections.abc import Iterable
from typing import NamedTuple

from components.gates.built_in.evaluation_gates import EVALUATION_GATES
from components.gates.built_in.human_eval_gates import HUMAN_EVAL_GATES
from components.gates.built_in.policy_gates import POLICY_GATES
from components.gates.built_in.ppo_gates import PPO_GATES
from components.gates.built_in.reward_gates import REWARD_GATES
from components.gates.built_in.sft_gates import SFT_GATES
from components.gates.built_in.validate_gates import VALIDATE_GATES

_IN_ORDER = VALIDATE_GATES + SFT_GATES + REWARD_GATES + POLICY_GATES + PPO_GATES + EVALUATION_GATES + HUMAN_EVAL_GATES
GATES = {gate.name: gate for gate in _IN_ORDER}
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
        MainMetric("policy/proxy_reward", "reward model's scaled score of the policy", brief=True, card=False),
        MainMetric("policy/kl", "KL to the SFT model", "nats a response", brief=True),
        MainMetric("policy/kl_per_token", "KL to the SFT model", "nats a token", brief=True),
        MainMetric("policy/reward_gain", "reward model's score over the SFT model's", "in its standard deviations"),
        MainMetric("policy/worse_prompts", "share of prompts whose mean score is below the SFT model's"),
        MainMetric("policy/kl_beyond_ceiling", "share of responses whose KL is above ppo.kl.response_ceiling"),
        MainMetric("policy/reward_gain_ended", "the same where both responses ended", "in its standard deviations"),
        MainMetric(
            "policy/judge_gain",
            "score over the SFT model's by the strictest judge",
            "in its standard deviations",
            brief=True,
        ),
        MainMetric("policy/entropy", "entropy", "nats a token"),
        MainMetric("policy/response_tokens", "tokens", "a response"),
        MainMetric("policy/ended", "share of responses that end"),
        MainMetric("policy/gold", "simulated gold score", brief=True),
        MainMetric("policy/violations", "simulated policy violations", "a response", brief=True),
        MainMetric("policy/rule_violations", "violations of the team's rules", "a response", brief=True),
        MainMetric("policy/chosen_log_ratio", "held-out chosen responses against the SFT model", "nats a response"),
        MainMetric("policy/rejected_log_ratio", "held-out rejected responses against the SFT model", "nats a response"),
        MainMetric("policy/pair_accuracy", "held-out pairs that the policy orders right"),
        MainMetric(
            "policy/rule_violations_excess", "violations of the team's rules above the SFT model's", "a response"
        ),
    ),
    "evaluation": tuple(MainMetric(gate.metric, gate.description, brief=True) for gate in EVALUATION_GATES),
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
        by_source = {name: sorted(n for n in names if n.startswith(f"{name}{OF_SOURCE}")) for name in brief}
        return [listed for name in brief for listed in (name, *by_source[name])]
    return sorted(name for name in names if name.startswith(f"{stage}/"))[:4]
