"""Gates of PPO's training."""

from components.gates.gate import Gate
from components.gates.remedies import LONGER_RESPONSES, SMALLER_STEPS, TIGHTER_TETHER, OptionChange, times

PPO_GATES = (
    Gate(
        "ppo.stopped", "<=", "the tether held: KL stayed below its ceiling and in its band in every update",
        interval="none", if_measured=True,
        cause="The tether broke: KL was above `ppo.kl.ceiling` or certainly above `ppo.kl.band`, an alarm of "
        "`ppo.monitors.stop_on` or of `policy.stop_on_alarm` was raised, or an observer of `ppo.observers` stopped the "
        "run. The run's log says which, and at which update.",
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
)  # fmt: skip
