"""Gates of a trained policy, by its final evaluation."""

from functools import partial

from components.gates.gate import Gate
from components.gates.remedies import (
    AT_LEAST_THE_BOUND,
    KL_TO_ITS_BOUND,
    LONGER_RESPONSES,
    LOOSER_TETHER,
    TIGHTER_TETHER,
    OptionChange,
    times,
)

PolicyGate = partial(Gate, stage="ppo")
"""A gate on metrics that the stage `ppo` records."""

POLICY_GATES = (
    PolicyGate(
        "policy.kl", "<=", "held-out KL to SFT, nats per response, upper end", "policy/kl_high",
        cause="The policy is further from SFT than the profile allows, in nats per response.",
        remedy="Lower `ppo.kl.target`, raise `ppo.kl.coefficient` if β is fixed, or lower `ppo.learning_rate`. If so "
        "high a KL is acceptable, raise `ppo.kl.band`, which the gate takes as its threshold.",
        changes=KL_TO_ITS_BOUND,
    ),
    PolicyGate(
        "policy.kl_per_token", "<=", "held-out KL to SFT, nats per token, upper end", "policy/kl_per_token_high",
        cause="The policy is further from SFT than the profile allows, in nats per token.",
        remedy="Lower `ppo.kl.target`, or raise `ppo.kl.coefficient` if β is fixed. If so high a KL is acceptable, "
        "raise `ppo.kl.band`, which the gate takes as its threshold with `ppo.kl.unit=token`.",
        changes=KL_TO_ITS_BOUND,
    ),
    PolicyGate(
        "policy.kl_floor", ">=", "the policy has moved away from SFT, lower end of KL", "policy/kl_low", warn_only=True,
        cause="The policy has hardly moved away from SFT: too few updates, too low a learning rate, or too strong a "
        "tether.",
        remedy="Raise `ppo.learning_rate` or `ppo.updates`, or lower `ppo.kl.coefficient`.",
        changes=LOOSER_TETHER,
    ),
    PolicyGate(
        "policy.evaluated", ">=", "held-out prompts that the policy's gates are measured on", interval="none",
        cause="Too few held-out prompts: every other gate of the policy has a wide interval.",
        remedy="Raise `ppo.evaluate`, and `data.split.test` if the split holds fewer prompts.",
        changes=(OptionChange("ppo.evaluate", AT_LEAST_THE_BOUND),),
    ),
    PolicyGate(
        "policy.reward_gain_low", ">", "gain in the reward model's score over SFT on held-out prompts, lower end",
        cause="The policy does not certainly score higher than SFT: it has learned too little, or the tether is too "
        "strong.",
        remedy="Raise `ppo.updates` or `ppo.learning_rate`, or raise `ppo.kl.target`. Raise `ppo.evaluate` if only the "
        "interval is wide.",
        changes=(OptionChange("ppo.updates", times(2)), OptionChange("policy.epochs", times(2))),
    ),
    PolicyGate(
        "policy.worse_prompts", "<=",
        "share of prompts whose mean score falls, less what two draws of SFT give, upper end",
        "policy/worse_prompts_excess_high",
        cause="The mean gain hides prompts on which the policy scores lower than SFT: others pay for them.",
        remedy="Read the worst prompts in the report (`worst.jsonl`). Collect preferences on prompts like these, or "
        "lower `ppo.kl.target`. If the policy has hardly learned, see `policy.reward_gain_low`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.kl_beyond_ceiling", "<=",
        "share of held-out responses whose KL to SFT is above ppo.kl.response_ceiling, upper end",
        "policy/kl_beyond_ceiling_high",
        cause="The mean KL hides responses that SFT would hardly ever give.",
        remedy="Read those of the highest KL in the report (`worst.jsonl`). Lower `ppo.kl.target`, or collect "
        "preferences in which they lose. If the target was raised, set `ppo.kl.response_ceiling` to about six times of "
        "it.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.demonstration_perplexity_ratio", "<=",
        "perplexity of demonstrations against SFT's (capability kept), upper end",
        "policy/demonstration_perplexity_ratio_high",
        cause="The policy finds the demonstrations much less likely than SFT does: it forgets what SFT taught.",
        remedy="Set `ppo.ptx.coefficient`, which adds SFT's loss, or lower `ppo.kl.target`.",
        changes=(OptionChange("ppo.ptx.coefficient", times(2), if_zero=0.5), *TIGHTER_TETHER),
    ),
    PolicyGate(
        "policy.repetition", "<=", "repetition in responses, upper end", "policy/repetition_high",
        cause="Responses repeat themselves. Repetition is paid for, or the policy has collapsed.",
        remedy="Lower `ppo.kl.target`, add pairs in which repetition loses, and look at "
        "`reward.probe_repetition_high`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.echo", "<=", "responses that repeat the prompt back, upper end", "policy/echo_high",
        cause="Responses repeat the prompt back. Annotators or the reward model like that.",
        remedy="Add pairs in which the echo loses to `data.preferences`, or lower `ppo.kl.target`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.distinct", ">=",
        "distinct 4-grams of all responses against SFT's, lower end", "policy/distinct_ratio_low",
        cause="The responses together use fewer different 4-grams than SFT's: the policy answers many prompts alike.",
        remedy="Lower `ppo.kl.target`, or set `ppo.entropy_coefficient` or `ppo.clip_range_high`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.dissimilarity", ">=",
        "difference between responses to two prompts, against SFT's, lower end", "policy/dissimilarity_ratio_low",
        cause="Responses to different prompts resemble each other more than SFT's do: the policy has found one "
        "template.",
        remedy="Lower `ppo.kl.target`, or set `ppo.entropy_coefficient`. Look for the alarm `template`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.entropy_ratio", ">=", "entropy a token against SFT's, lower end", "policy/entropy_ratio_low",
        cause="The policy is far more certain of each token than SFT. It has nearly stopped exploring.",
        remedy="Set `ppo.clip_range_high` or `ppo.entropy_coefficient`, lower `ppo.epochs`, or lower `ppo.kl.target`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.length_ratio", "between", "response length against SFT's, both ends", interval="both",
        cause="Responses are much longer or much shorter than SFT's. Length is paid for, or ending early is.",
        remedy="Set `ppo.score.length_penalty` if they grow, and look at `reward.length_partial_correlation_high`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.ended", ">=", "share of responses that end by themselves, lower end", "policy/ended_low",
        cause="Many responses meet the cap without EOS.",
        remedy="Keep `ppo.score.missing_eos=replace`, set `ppo.score.length_penalty`, or raise "
        "`generation.max_new_tokens`.",
        changes=(OptionChange("ppo.score.missing_eos", "replace"), LONGER_RESPONSES),
    ),
    PolicyGate(
        "policy.special_tokens", "<=",
        "responses with a special token before their end, upper end", "policy/special_tokens_high",
        cause="Responses hold special tokens, such as a role's, before their end. Chat templates act on them.",
        remedy="Lower `ppo.kl.target`. Look in the demonstrations for markers that stand in a text "
        "(`data.checks.no_markers`).",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.violations_excess", "<=",
        "policy violations above SFT's (built-in task), upper end", "policy/violations_excess_high",
        cause="The policy violates the built-in task's rules more often than SFT: it exploits the reward model's flaw.",
        remedy="Lower `ppo.kl.target` or raise `ppo.kl.coefficient`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.rule_violations_excess", "<=",
        "violations of ppo.rules above SFT's, a response, upper end", "policy/rule_violations_excess_high",
        if_measured=True,
        cause="The policy violates the team's own rules (`ppo.rules`) more often than SFT.",
        remedy="Read these responses in `evaluation.jsonl` (`rule_violations`). Lower `ppo.kl.target`, or make the "
        "rules a cost: `ppo.rules.penalty`, or a source of `ppo.rewards` with a weight below 0.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.judge_gain_low", ">", "gain over SFT by every judge, none of which ever rewarded, lower end",
        if_measured=True,
        cause="A judge that gives no reward (that of `data.judge_preferences`, or one of `ppo.rewards`) sees no gain "
        "over SFT although the reward does: the policy may exploit the reward.",
        remedy="Compare `policy/judge_NAME_gain` with `policy/reward_gain`, and read responses in `evaluation.jsonl`. "
        "Lower `ppo.kl.target`, or collect new preferences on the policy's own responses.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.chosen_log_ratio", ">=",
        "log-probability of held-out chosen responses above SFT's, nats a response, lower end",
        "policy/chosen_log_ratio_low", if_measured=True,
        cause="The policy finds the chosen responses of held-out pairs less likely than SFT does. A direct method only "
        "raises the difference of chosen and rejected, and both may fall: what it then says is in no pair.",
        remedy="Raise `policy.beta`, or lower `policy.epochs` or `policy.learning_rate`. Compare "
        "`policy/rejected_log_ratio`, and read responses in `evaluation.jsonl`.",
        changes=TIGHTER_TETHER,
    ),
    PolicyGate(
        "policy.balanced_length_accuracy", ">=",
        "held-out pairs that the policy orders right, with longer and shorter winners weighed alike, lower end",
        "policy/balanced_length_accuracy_low", if_measured=True,
        cause="Where length does not help, the policy's implicit reward tells chosen from rejected no better than the "
        "profile asks: it may have learned length alone.",
        remedy="Add pairs whose shorter response wins, or train longer (`policy.epochs`). Compare "
        "`policy/length_ratio` and the reward model's `reward.balanced_length_accuracy_low`.",
        changes=(OptionChange("policy.epochs", times(2)),),
    ),
)  # fmt: skip
