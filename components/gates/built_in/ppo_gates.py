"""Gates of PPO and of its policy."""

from components.gates.gate import Gate
from components.gates.remedies import (
    AT_LEAST_THE_BOUND,
    KL_TO_ITS_BOUND,
    LONGER_RESPONSES,
    LOOSER_TETHER,
    SMALLER_STEPS,
    TIGHTER_TETHER,
    OptionChange,
    times,
)

PPO_GATES = (
    Gate(
        "ppo.kl", "<=", "held-out KL to SFT, nats per response, upper end", "ppo/kl_high",
        cause="The policy is further from SFT than the profile allows, in nats per response.",
        remedy="Lower `ppo.kl.target`, raise `ppo.kl.coefficient` if β is fixed, or lower `ppo.learning_rate`. If so "
        "high a KL is acceptable, raise `ppo.kl.band`, which the gate takes as its threshold.",
        changes=KL_TO_ITS_BOUND,
    ),
    Gate(
        "ppo.kl_per_token", "<=", "held-out KL to SFT, nats per token, upper end", "ppo/kl_per_token_high",
        cause="The policy is further from SFT than the profile allows, in nats per token.",
        remedy="Lower `ppo.kl.target`, or raise `ppo.kl.coefficient` if β is fixed. If so high a KL is acceptable, "
        "raise `ppo.kl.band`, which the gate takes as its threshold with `ppo.kl.unit=token`.",
        changes=KL_TO_ITS_BOUND,
    ),
    Gate(
        "ppo.kl_floor", ">=", "the policy has moved away from SFT, lower end of KL", "ppo/kl_low", warn_only=True,
        cause="The policy has hardly moved away from SFT: too few updates, too low a learning rate, or too strong a "
        "tether.",
        remedy="Raise `ppo.learning_rate` or `ppo.updates`, or lower `ppo.kl.coefficient`.",
        changes=LOOSER_TETHER,
    ),
    Gate(
        "ppo.stopped", "<=", "the tether held: KL stayed below its ceiling and in its band in every update",
        interval="none", if_measured=True,
        cause="The tether broke: KL was above `ppo.kl.ceiling` or certainly above `ppo.kl.band`, or an alarm of "
        "`ppo.monitors.stop_on` was raised. The run's log says which, and at which update.",
        remedy="Raise `ppo.kl.coefficient`, use `ppo.kl.control=adaptive`, lower `ppo.learning_rate`, or lower "
        "`ppo.epochs` (one pass over each batch moves KL least). For an alarm see the page on alarms.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.beta_drift_below_target", "<=", "log β had settled, or KL was not below its target, in the last third",
        warn_only=True, if_measured=True,
        cause="KL is below its target and β still falls: the run ended before the policy reached its target.",
        remedy="Raise `ppo.updates`, lower `ppo.kl.coefficient` at the start, or lower `ppo.kl.horizon` so that β "
        "moves faster.",
        changes=(OptionChange("ppo.updates", times(1.5)),),
    ),
    Gate(
        "ppo.proxy_rise_at_level_kl", "<=", "proxy reward does not climb while KL stays level, SFT deviations",
        warn_only=True, if_measured=True,
        cause="The reward model's score rises while KL stays level. The policy may be exploiting the reward model in a "
        "way that costs no KL.",
        remedy="Read the samples. Use several reward models (`reward.members` with `ppo.score.ensemble=minimum`), or "
        "lower `ppo.updates`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.ratio_max", "<=", "largest ratio of a token's probability to the old policy's", warn_only=True,
        cause="In some update a token became far more likely than when it was sampled. A few such tokens may dominate "
        "it.",
        remedy="Lower `ppo.learning_rate` or `ppo.epochs`, or set `ppo.dual_clip`.",
        changes=SMALLER_STEPS,
    ),
    Gate(
        "ppo.clip_fraction_max", "<=", "no update had most of its tokens at the clip", warn_only=True,
        cause="In some update most tokens were at the clip: the steps are too large, and the clip takes most gradients "
        "away.",
        remedy="Lower `ppo.learning_rate` or `ppo.epochs`, or raise `ppo.minibatch_size`.",
        changes=SMALLER_STEPS,
    ),
    Gate(
        "ppo.replaced_max", "<=", "no five updates in a row had most of their scores replaced for a missing EOS",
        interval="none", if_measured=True,
        cause="In five updates in a row most responses met the cap without EOS, and their scores were replaced by one "
        "number. PPO then learns to end, and little else.",
        remedy="Raise `generation.max_new_tokens`, or make SFT end its responses (see `sft.ended`). "
        "`ppo.score.missing_eos=subtract` keeps the score and takes a penalty off.",
        changes=(LONGER_RESPONSES,),
    ),
    Gate(
        "ppo.score_spread_min", ">", "smallest spread of scores within an update, SFT deviations", interval="none",
        cause="In some update all responses had the same score, so there was nothing to learn.",
        remedy="Look at `ppo.replaced_max`; raise `ppo.score.clip` if scores are cut; raise `ppo.batch_size` or "
        "`generation.temperature` if the responses are all alike.",
        changes=(OptionChange("ppo.batch_size", times(2)),),
    ),
    Gate(
        "ppo.evaluated", ">=", "held-out prompts that PPO's gates are measured on", interval="none",
        cause="Too few held-out prompts: every other gate of PPO has a wide interval.",
        remedy="Raise `ppo.evaluate`, and `data.split.test` if the split holds fewer prompts.",
        changes=(OptionChange("ppo.evaluate", AT_LEAST_THE_BOUND),),
    ),
    Gate(
        "ppo.reward_gain_low", ">", "gain in the reward model's score over SFT on held-out prompts, lower end",
        cause="The policy does not certainly score higher than SFT: it has learned too little, or the tether is too "
        "strong.",
        remedy="Raise `ppo.updates` or `ppo.learning_rate`, or raise `ppo.kl.target`. Raise `ppo.evaluate` if only the "
        "interval is wide.",
        changes=(OptionChange("ppo.updates", times(2)),),
    ),
    Gate(
        "ppo.worse_prompts", "<=",
        "share of prompts whose mean score falls, less what two draws of SFT give, upper end",
        "ppo/worse_prompts_excess_high",
        cause="The mean gain hides prompts on which the policy scores lower than SFT: others pay for them.",
        remedy="Read the worst prompts in the report (`worst.jsonl`). Collect preferences on prompts like these, or "
        "lower `ppo.kl.target`. If the policy has hardly learned, see `ppo.reward_gain_low`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.kl_beyond_ceiling", "<=",
        "share of held-out responses whose KL to SFT is above ppo.kl.response_ceiling, upper end",
        "ppo/kl_beyond_ceiling_high",
        cause="The mean KL hides responses that SFT would hardly ever give.",
        remedy="Read those of the highest KL in the report (`worst.jsonl`). Lower `ppo.kl.target`, or collect "
        "preferences in which they lose. If the target was raised, set `ppo.kl.response_ceiling` to about six times of "
        "it.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.demonstration_perplexity_ratio", "<=",
        "perplexity of demonstrations against SFT's (capability kept), upper end",
        "ppo/demonstration_perplexity_ratio_high",
        cause="The policy finds the demonstrations much less likely than SFT does: it forgets what SFT taught.",
        remedy="Set `ppo.ptx.coefficient`, which adds SFT's loss, or lower `ppo.kl.target`.",
        changes=(OptionChange("ppo.ptx.coefficient", times(2), if_zero=0.5),),
    ),
    Gate(
        "ppo.repetition", "<=", "repetition in responses, upper end", "ppo/repetition_high",
        cause="Responses repeat themselves. Repetition is paid for, or the policy has collapsed.",
        remedy="Lower `ppo.kl.target`, add pairs in which repetition loses, and look at "
        "`reward.probe_repetition_high`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.echo", "<=", "responses that repeat the prompt back, upper end", "ppo/echo_high",
        cause="Responses repeat the prompt back. Annotators or the reward model like that.",
        remedy="Add pairs in which the echo loses to `data.preferences`, or lower `ppo.kl.target`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.distinct", ">=", "distinct 4-grams of all responses against SFT's, lower end", "ppo/distinct_ratio_low",
        cause="The responses together use fewer different 4-grams than SFT's: the policy answers many prompts alike.",
        remedy="Lower `ppo.kl.target`, or set `ppo.entropy_coefficient` or `ppo.clip_range_high`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.dissimilarity", ">=",
        "difference between responses to two prompts, against SFT's, lower end", "ppo/dissimilarity_ratio_low",
        cause="Responses to different prompts resemble each other more than SFT's do: the policy has found one "
        "template.",
        remedy="Lower `ppo.kl.target`, or set `ppo.entropy_coefficient`. Look for the alarm `template`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.entropy_ratio", ">=", "entropy a token against SFT's, lower end", "ppo/entropy_ratio_low",
        cause="The policy is far more certain of each token than SFT. It has nearly stopped exploring.",
        remedy="Set `ppo.clip_range_high` or `ppo.entropy_coefficient`, lower `ppo.epochs`, or lower `ppo.kl.target`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.length_ratio", "between", "response length against SFT's, both ends", interval="both",
        cause="Responses are much longer or much shorter than SFT's. Length is paid for, or ending early is.",
        remedy="Set `ppo.score.length_penalty` if they grow, and look at `reward.length_partial_correlation_high`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.ended", ">=", "share of responses that end by themselves, lower end", "ppo/ended_low",
        cause="Many responses meet the cap without EOS.",
        remedy="Keep `ppo.score.missing_eos=replace`, set `ppo.score.length_penalty`, or raise "
        "`generation.max_new_tokens`.",
        changes=(OptionChange("ppo.score.missing_eos", "replace"), LONGER_RESPONSES),
    ),
    Gate(
        "ppo.special_tokens", "<=",
        "responses with a special token before their end, upper end", "ppo/special_tokens_high",
        cause="Responses hold special tokens, such as a role's, before their end. Chat templates act on them.",
        remedy="Lower `ppo.kl.target`. Look in the demonstrations for markers that stand in a text "
        "(`data.checks.no_markers`).",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.violations_excess", "<=",
        "policy violations above SFT's (built-in task), upper end", "ppo/violations_excess_high",
        cause="The policy violates the built-in task's rules more often than SFT: it exploits the reward model's flaw.",
        remedy="Lower `ppo.kl.target` or raise `ppo.kl.coefficient`.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.rule_violations_excess", "<=",
        "violations of ppo.rules above SFT's, a response, upper end", "ppo/rule_violations_excess_high",
        if_measured=True,
        cause="The policy violates the team's own rules (`ppo.rules`) more often than SFT.",
        remedy="Read these responses in `evaluation.jsonl` (`rule_violations`). Lower `ppo.kl.target`, or make the "
        "rules a cost: a source of `ppo.rewards` with a weight below 0.",
        changes=TIGHTER_TETHER,
    ),
    Gate(
        "ppo.judge_gain_low", ">", "gain over SFT by every judge, none of which ever rewarded, lower end",
        if_measured=True,
        cause="A judge that gives no reward (that of `data.judge_preferences`, or one of `ppo.rewards`) sees no gain "
        "over SFT although the reward does: the policy may exploit the reward.",
        remedy="Compare `ppo/judge_NAME_gain` with `ppo/reward_gain`, and read responses in `evaluation.jsonl`. Lower "
        "`ppo.kl.target`, or collect new preferences on the policy's own responses.",
        changes=TIGHTER_TETHER,
    ),
)  # fmt: skip
