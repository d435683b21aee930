"""Gates of human evaluation."""

from components.gates.gate import Gate
from components.gates.remedies import AT_LEAST_THE_BOUND, OptionChange, at_least, times

HUMAN_EVAL_GATES = (
    Gate(
        "human_eval.labels_complete", ">=", "share of the ratings asked for that were given", interval="none",
        cause="Ratings are missing in the sheet or in a rater's file.",
        remedy="Ask for the rest; the status says how many each rater has given. Then score again.",
        command="tether people status RUN",
    ),
    Gate(
        "human_eval.items", ">=", "enough rated items", interval="none",
        cause="Too few items were rated to estimate the win rate.",
        remedy="Raise `human_eval.items`, and `data.split.test` if the split holds fewer prompts.",
        changes=(OptionChange("human_eval.items", AT_LEAST_THE_BOUND),),
    ),
    Gate(
        "human_eval.fleiss_kappa", ">=", "judges agree (Fleiss' kappa), lower end", "human_eval/fleiss_kappa_low",
        cause="The raters do not agree beyond chance: the guidelines are unclear, or the replies hardly differ.",
        remedy="Make the guidelines clearer (`human_eval.guidelines`), ask more raters (`human_eval.raters`), and read "
        "the pairs on which they differ.",
        command="tether rerun human_eval --set human_eval.guidelines=FILE.md",
    ),
    Gate(
        "human_eval.position_bias", "<=",
        "distance from 1/2 of raters who certainly prefer a side, upper end", "human_eval/position_bias_high",
        cause="A rater certainly prefers one side, whichever reply it shows, or all raters together do. The report "
        "names the rater.",
        remedy="Ask that rater again, or replace them. `human_eval.repeats` shows pairs again with sides exchanged, "
        "which makes the habit visible.",
        changes=(OptionChange("human_eval.repeats", at_least(0.25)),),
    ),
    Gate(
        "human_eval.self_agreement_low", ">=", "raters answer repeated items alike, lower end",
        cause="Raters answer a repeated item differently: they guess, or the pairs are too close. With few repeated "
        "items the interval alone may be too wide.",
        remedy="Raise `human_eval.repeats`, and make the guidelines clearer (`human_eval.guidelines`).",
        changes=(OptionChange("human_eval.repeats", at_least(0.25)),),
    ),
    Gate(
        "human_eval.raters_alike", "<=", "share of equal answers of two raters who certainly copy, else of all pairs",
        interval="none", if_measured=True,
        cause="Two raters gave almost the same answers, more of them than chance explains. One column may be a copy of "
        "the other. The report names them.",
        remedy="Ask the two raters. The answers count once if they are one person's: have somebody else rate.",
        command="tether people status RUN",
    ),
    Gate(
        "human_eval.attention_low", ">=", "right answers of raters who answer as if at random, lower end",
        if_measured=True,
        cause="A rater answers as if at random: wrong on items whose right answer is known, and hardly ever as the "
        "others do. The report names the rater.",
        remedy="Replace the rater's answers, or raise `human_eval.attention` so that there are more such items.",
        changes=(OptionChange("human_eval.attention", at_least(0.2)),),
    ),
    Gate(
        "human_eval.win_rate_low", ">=", "win rate against SFT, lower end over prompts and raters",
        cause="People do not certainly prefer the policy to SFT. If the reward rose, the reward model is wrong about "
        "it.",
        remedy="Train the next policy on what people said, or lower `ppo.kl.target`. Raise `human_eval.items` if only "
        "the interval is wide.",
        changes=(OptionChange("human_eval.items", times(2)),), command="tether iterate RUN",
    ),
    Gate(
        "human_eval.reward_agreement_low", ">", "reward model prefers what the judges prefer, lower end",
        cause="The reward model does not prefer what the raters prefer, on the policy's own replies. More PPO on it "
        "gains nothing.",
        remedy="Train the next reward model on these votes.",
        command="tether iterate RUN",
    ),
    Gate(
        "human_eval.reward_ece", "<=", "reward model's calibration error on the judged pairs",
        or_within="human_eval/reward_ece_null_95",
        cause="The reward model is over- or underconfident on the policy's replies, which differ from its training "
        "data.",
        remedy="Train the next reward model on these votes, or raise `reward.members`.",
        command="tether iterate RUN",
    ),
)  # fmt: skip
