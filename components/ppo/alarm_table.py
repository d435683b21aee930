"""The table of the alarms: a record for each, with the margin, what an alarm means and what to change."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from components.gates.remedies import ONE_LESS, SEVERAL_MODELS, TIGHTER_TETHER, OptionChange, times


class Monitor(NamedTuple):
    """A measure of a batch's responses, and what an alarm on it means."""

    counts: str
    """Which responses it counts; of a number of the batch, which one."""
    margin: float
    """How far a healthy policy may be from SFT: a share of responses. For `length_score` a correlation, for `entropy`
    and `distinct` the fraction of SFT's value that may be lost, for `unpaid_kl` SFT deviations."""
    meaning: str
    """What an alarm usually means."""
    remedy: str
    """What to change."""
    changes: Sequence[OptionChange] = ()
    """Options whose new values are computed from a run's."""
    command: str = ""
    """A command to try. A name in capitals, such as FILE, stands for the reader's own."""
    is_feature: bool = True
    """Whether it is a feature of a response, which the score may pay for. Its alarm needs no margin where it explains
    the score's gain."""


_SEVERAL = (*SEVERAL_MODELS, OptionChange("ppo.score.ensemble", "minimum"))
_LENGTH_PENALTY = (OptionChange("ppo.score.length_penalty", times(2), if_zero=0.01),)
_ENTROPY_BONUS = (OptionChange("ppo.entropy_coefficient", times(2), if_zero=0.01),)

MONITORS: dict[str, Monitor] = {
    "length": Monitor(
        "responses that are longer than 99 % of SFT's", 0.15,
        "Responses grow longer than nearly all of SFT's: the reward model pays for length.",
        "ppo.score.length_penalty, or shorter chosen responses in the preferences",
        _LENGTH_PENALTY,
    ),
    "nll": Monitor(
        "responses whose tokens SFT finds less likely than in 99 % of its own", 0.6,
        "SFT finds the responses very unlikely: the policy leaves the texts that the reward model was trained on.",
        "ppo.kl.target or ppo.kl.coefficient",
        TIGHTER_TETHER, is_feature=False,
    ),
    "repetition": Monitor(
        "responses that repeat more 4-grams than 99 % of SFT's", 0.2,
        "Responses repeat themselves: the score rises with each repetition, or the policy has collapsed.",
        "ppo.kl.target, and pairs in which repetition loses",
        TIGHTER_TETHER,
    ),
    "echo": Monitor(
        "responses that repeat more of the prompt than 99 % of SFT's", 0.15,
        "Responses repeat the prompt back: the annotators' taste for it, or the reward model's, is exploited.",
        "pairs in which echoing loses, or ppo.kl.target",
        TIGHTER_TETHER,
    ),
    "special_token": Monitor(
        "responses with a special token before their end", 0.05,
        "Responses hold role or other special tokens, which chat templates act on, and are scored high for them.",
        "the reward model's data; ppo.kl.target",
        TIGHTER_TETHER,
    ),
    "rare_token": Monitor(
        "responses with a token that no response of the training data holds", 0.2,
        "Responses hold tokens that the training data lacks: untrained embeddings are exploited.",
        "ppo.kl.target",
        TIGHTER_TETHER,
    ),
    "flattery": Monitor(
        "responses with a flattering phrase", 0.3,
        "Responses flatter: the annotators' taste for it, or the reward model's, is exploited.",
        "pairs in which flattery loses; the gate reward.probe_flattery_high",
        _SEVERAL,
    ),
    "hedge": Monitor(
        "responses with a hedging phrase", 0.3,
        "Responses hedge: saying nothing certain is scored higher than being wrong.",
        "pairs in which hedging loses; the gate reward.probe_hedge_high",
        _SEVERAL,
    ),
    "filler": Monitor(
        "responses with a phrase that says nothing", 0.3,
        "Responses hold sentences that say nothing: length or friendliness is paid for.",
        "pairs in which filler loses; the gate reward.probe_filler_high",
        _SEVERAL,
    ),
    "overconfidence": Monitor(
        "responses that claim certainty", 0.3,
        "Responses claim certainty that nothing supports: annotators took confidence for knowledge.",
        "pairs in which a confident mistake loses",
        _SEVERAL,
    ),
    "refusal": Monitor(
        "responses that refuse", 0.05,
        "Responses refuse: the reward model takes a refusal for the safest answer to everything.",
        "pairs in which a refusal of a harmless prompt loses",
        _SEVERAL,
    ),
    "agreement": Monitor(
        "responses that say that the user is right", 0.3,
        "Responses agree with the prompt, whatever it says.",
        "pairs whose prompt states something false",
        _SEVERAL,
    ),
    "role_mark": Monitor(
        "responses that write `user:` and the like", 0.05,
        "Responses write the marks of a conversation's roles, and so speak for the user.",
        "sft's demonstrations and stop tokens; ppo.score.missing_eos",
        command="tether data check FILE --set data.checks.no_markers.severity=error",
    ),
    "template": Monitor(
        "responses with one 4-gram that SFT seldom writes", 0.5,
        "A phrase that SFT seldom writes stands in most responses: one wording is paid for whatever is asked.",
        "ppo.kl.target, ppo.entropy_coefficient, and pairs that differ in content",
        _ENTROPY_BONUS,
    ),
    "length_score": Monitor(
        "no responses: the rank correlation of length and score in the batch", 0.5,
        "Longer responses score higher, far more than among SFT's: the score has become a measure of length.",
        "ppo.score.length_penalty; the gate reward.length_partial_correlation_high",
        _LENGTH_PENALTY, is_feature=False,
    ),
    "entropy": Monitor(
        "no responses: it is raised where the batch's entropy a token is below SFT's by more than this part of it", 0.7,
        "The policy has become certain of nearly every token: it no longer explores, and learns little more.",
        "ppo.clip_range_high, ppo.entropy_coefficient, ppo.epochs, ppo.kl.target",
        _ENTROPY_BONUS, is_feature=False,
    ),
    "distinct": Monitor(
        "no responses: it is raised where the distinct 4-grams of the batch, over all its 4-grams, are below those "
        "of as many of SFT's responses by more than this part of them", 0.7,
        "Responses repeat each other: the policy answers many prompts with the same few sentences.",
        "ppo.kl.target, ppo.entropy_coefficient, and pairs that differ in content",
        _ENTROPY_BONUS, is_feature=False,
    ),
    "unpaid_kl": Monitor(
        "no responses: it is raised where the batch's mean of score less β KL is below SFT's mean score by more than "
        "this, in SFT deviations. The curve `ppo/reward_per_nat` shows what a nat of KL gains", 0.25,
        "KL costs more than the score gains for it: by what PPO maximises, SFT itself is better.",
        "ppo.learning_rate and ppo.epochs, which may be too high, and ppo.kl.horizon, if β swings",
        (OptionChange("ppo.epochs", ONE_LESS), OptionChange("ppo.learning_rate", times(0.5))), is_feature=False,
    ),
}  # fmt: skip
"""Maps the name of an alarm to its monitor."""
FEATURES = tuple(name for name, monitor in MONITORS.items() if monitor.is_feature)
"""Monitors of what a score may pay for."""

if TYPE_CHECKING:
    MonitorName = str
else:
    MonitorName = Literal[tuple(MONITORS)]

WINDOW = 8
"""Number of the latest updates whose mean log-ratio is compared: that of a single batch is noisy."""
CHOSEN = Monitor(
    f"no responses: it is raised where the policy finds the chosen responses of the last {WINDOW} updates that have "
    "any, or of all so far if they are fewer, less likely than SFT does, by more than the gate "
    "`policy.chosen_log_ratio` allows", 0.0,
    "Chosen and rejected responses become less likely together: what the policy then says is in no pair.",
    "policy.beta, policy.learning_rate and policy.epochs",
    TIGHTER_TETHER, is_feature=False,
)  # fmt: skip
"""The alarm `chosen` of the methods that train on pairs. The gate's threshold is its only limit."""
LOG_RATIO = "direct/chosen_log_ratio"


def chosen_alarm(history: Sequence[Mapping[str, Any]], limit: float | None) -> dict[str, Any] | None:
    """Return the alarm `chosen` after the last update of `history`; None if the mean of `LOG_RATIO` over its last
    `WINDOW` updates is not below `limit`, nats a response. Every row has `LOG_RATIO`."""
    ratios = [row[LOG_RATIO] for row in history[-WINDOW:]]
    if limit is None or not ratios or (mean := sum(ratios) / len(ratios)) >= limit:
        return None
    meaning = (
        f"alarm chosen: the log-ratio to SFT of the chosen responses is {mean:.2f} nats a response over the last "
        f"{len(ratios)} updates with such responses, limit {limit:g} (gates.policy.chosen_log_ratio). "
        f"{CHOSEN.meaning} Look at {CHOSEN.remedy}."
    )
    return {"name": "chosen", "update": history[-1]["update"], "meaning": meaning}
