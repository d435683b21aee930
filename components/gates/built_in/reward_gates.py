"""Gates of the reward model and the independent judge."""

from components.gates.gate import Gate
from components.gates.remedies import (
    AT_LEAST_THE_BOUND,
    HALF,
    LESS_CONFIDENCE,
    MORE_EPOCHS,
    SEVERAL_MODELS,
    OptionChange,
    times,
)


def _probe(name: str, addition: str, pairs: str) -> Gate:
    """Return the gate on the rise in score by an addition to a text; `pairs` says which pairs teach against it."""
    return Gate(
        f"reward.probe_{name}_high", "<=", f"rise in score by {addition}, SFT deviations, upper end",
        cause=f"The reward model pays for {addition}. A policy finds such a reward and writes it everywhere.",
        remedy=(
            f"Add pairs in which {pairs} to `data.preferences`, or train several models with `reward.members` and "
            "reward their lowest score with `ppo.score.ensemble=minimum`."
        ),
        changes=SEVERAL_MODELS,
    )  # fmt: skip


REWARD_GATES = (
    Gate(
        "reward.accuracy_low", ">=", "held-out accuracy, lower end of its interval",
        cause="The reward model does not predict held-out labels well enough: too few pairs, noisy labels, or a wrong "
        "learning rate. With few test pairs the interval alone may be too wide.",
        remedy="Add pairs to `data.preferences`, set `reward.learning_rate`, or raise `reward.members`. With few, "
        "noisy pairs `reward.head_start=zeros` helps.",
        changes=MORE_EPOCHS,
    ),
    Gate(
        "reward.ece", "<=", "calibration error after temperature", or_within="reward/ece_null_95",
        cause="The probabilities that the score differences stand for do not match how often responses win.",
        remedy="Give the temperature more pairs (`data.split.calibration`), or train on shares of votes "
        "(`reward.labels=shares`). Fewer `reward.epochs` helps a model that is overconfident.",
        changes=LESS_CONFIDENCE,
    ),
    Gate(
        "reward.calibration_slope", "between", "recalibration slope",
        or_within=("reward/slope_null_low", "reward/slope_null_high"),
        cause="A slope below 1 means overconfident score differences, above 1 underconfident ones, on test pairs after "
        "temperature. The calibration pairs differ from the test pairs, or are too few.",
        remedy="Raise `data.split.calibration`. Below 1, also lower `reward.learning_rate` or `reward.epochs`.",
        changes=LESS_CONFIDENCE,
    ),
    Gate(
        "reward.temperature_at_end", "<=", "calibration pairs name a temperature: its fit met no end of the range",
        interval="none",
        cause="The temperature's fit met an end of its range: the model is no better than chance on the calibration "
        "pairs, or right on all of them.",
        remedy="Look at `reward.accuracy_low` first. Raise `data.split.calibration` if the split holds few pairs.",
        changes=MORE_EPOCHS,
    ),
    Gate(
        "reward.length_gain_low", ">", "accuracy above a length-only rule, lower end",
        cause="The reward model is no better than a rule that only compares lengths. A policy would learn to change "
        "length.",
        remedy="Add pairs whose longer response loses to `data.preferences`, or raise `reward.epochs` if accuracy is "
        "low too.",
        changes=MORE_EPOCHS, command="tether data check FILE --out findings",
    ),
    Gate(
        "reward.invariance", "<=", "a text scores the same alone, in a batch and padded", interval="none",
        cause="The same text scores differently alone, in a batch and padded. The model's attention or positions "
        "depend on padding, or the number format is too coarse.",
        remedy="Set `runtime.dtype=float32`. With a base of an unusual architecture set `reward.shared_prompts=false`.",
        changes=(OptionChange("runtime.dtype", "float32"), OptionChange("reward.shared_prompts", False)),
    ),
    Gate(
        "reward.ece_width", "<=", "the same in bins of equal width", or_within="reward/ece_width_null_95",
        cause="Like `reward.ece`, in bins of equal width: probabilities near 0 or 1 are wrong, though few pairs have "
        "them.",
        remedy="The same as for `reward.ece`: `data.split.calibration`, `reward.labels`, `reward.epochs`.",
        changes=LESS_CONFIDENCE,
    ),
    Gate(
        "reward.slice_accuracy_low", ">=", "accuracy in the worst slice, lower end",
        cause="In one slice (a category, a source, an annotator, a length) the model is not certainly better than "
        "chance. The report names the slice.",
        remedy="Add pairs of that slice to `data.preferences`. If the slice is small and means nothing to you, lower "
        "the gate's threshold.",
        changes=MORE_EPOCHS, command="tether status RUN --html",
    ),
    Gate(
        "reward.slice_ece_excess", "<=", "worst slice's calibration error above chance", interval="none",
        cause="The probabilities are wrong in one slice, more than chance explains. The report names the slice.",
        remedy="Add pairs of that slice to `data.preferences`, and raise `data.split.calibration`.",
        changes=LESS_CONFIDENCE, command="tether status RUN --html",
    ),
    Gate(
        "reward.majority_gain_low", ">", "accuracy above always naming the side that won more often, lower end",
        cause="The model is no better than always naming the side that won more often. The labels depend on the side, "
        "or the model learned nothing.",
        remedy="Check `data.columns` and whether the file always has the winner first (`data.checks.label_position`).",
        changes=MORE_EPOCHS, command="tether data check FILE --out findings",
    ),
    Gate(
        "reward.probe_texts", ">=", "texts that the rise in score is measured on", interval="none",
        cause="The probes were measured on too few texts, so their upper ends say little.",
        remedy="Raise `reward.probe_texts`, `data.split.test` or `generation.max_new_tokens` (a text that exceeds the "
        "cap with the added sentence is left out).",
        changes=(OptionChange("reward.probe_texts", AT_LEAST_THE_BOUND),),
    ),
    Gate(
        "reward.balanced_length_accuracy_low", ">=", "mean accuracy where the longer and the shorter won, lower end",
        cause="The model is right mainly where the longer response won. Its accuracy comes from length.",
        remedy="Add pairs whose shorter response wins to `data.preferences`, or take the length out of PPO's reward "
        "with `ppo.score.length_penalty`.",
        changes=MORE_EPOCHS,
    ),
    Gate(
        "reward.disagreement_auroc_low", ">=", "an ensemble disagrees more on soup than on SFT samples, lower end",
        cause="The ensemble's members agree on nonsense as much as on SFT samples, so their spread does not reveal "
        "nonsense.",
        remedy="Lower `reward.member_share`, so that members learn from different pairs, or raise `reward.members`.",
        changes=(*SEVERAL_MODELS, OptionChange("reward.member_share", times(0.7))),
    ),
    Gate(
        "reward.judge_accuracy_low", ">=", "the judge's held-out accuracy, lower end of its interval", if_measured=True,
        cause="The independent judge cannot tell its own held-out pairs apart well enough, so its gain says little.",
        remedy="Raise `judge.epochs`, or give `data.judge_preferences` more pairs.",
        changes=(OptionChange("judge.epochs", times(2)),),
    ),
    Gate(
        "reward.judge_ece", "<=", "the judge's calibration error after temperature",
        or_within="reward/judge_ece_null_95", if_measured=True,
        cause="The independent judge is over- or underconfident after its temperature, by more than chance.",
        remedy="Lower `judge.epochs` if it has learned its few pairs by heart, or give it more pairs.",
        changes=(OptionChange("judge.epochs", HALF),),
    ),
    Gate(
        "reward.judge_calibration_slope", "between", "the judge's recalibration slope",
        or_within=("reward/judge_slope_null_low", "reward/judge_slope_null_high"), if_measured=True,
        cause="The independent judge's score differences are too large (slope below 1) or too small (above 1).",
        remedy="Lower `judge.epochs` if it has learned its few pairs by heart, or give it more pairs.",
        changes=(OptionChange("judge.epochs", HALF),),
    ),
    Gate(
        "reward.judge_length_gain_low", ">", "the judge's accuracy above a length-only rule, lower end",
        if_measured=True,
        cause="The independent judge is hardly better than a rule that only sees length.",
        remedy="Raise `judge.epochs`, or give pairs in which the better response is not always the longer or the "
        "shorter one.",
        changes=(OptionChange("judge.epochs", times(2)),),
    ),
    Gate(
        "reward.refresh_gain_low", ">=", "accuracy on old pairs above the old model's, lower end", if_measured=True,
        cause="On the earlier model's test pairs the refreshed reward model is worse than the earlier one: it has "
        "forgotten.",
        remedy="Raise `reward.refresh.replay`, or lower `reward.learning_rate`.",
        changes=(OptionChange("reward.refresh.replay", times(2)),),
    ),
    Gate(
        "reward.suite_accuracy_low", ">=", "accuracy on every suite of reward.suites, lower end", if_measured=True,
        cause="On a suite of `reward.suites` the reward model agrees with the judges too rarely, or the suite has too "
        "few pairs: it may have learned what only these annotators like.",
        remedy="Look at the subsets in the report's table of suites (`suites.json`). Add pairs like those that it gets "
        "wrong to `data.preferences`; the suite itself must stay out of them.",
        changes=MORE_EPOCHS,
    ),
    Gate(
        "reward.brier_high", "<=", "Brier score after temperature, upper end",
        cause="The probabilities are no better than a coin's: the model cannot tell responses apart, or is "
        "overconfident.",
        remedy="Look at `reward.accuracy_low` and `reward.ece`: they say which of the two it is. Then change "
        "`reward.learning_rate`, `reward.epochs` or the data.",
        changes=SEVERAL_MODELS,
    ),
    Gate(
        "reward.log_loss_high", "<=", "log loss after temperature, nats a pair, upper end",
        cause="Like `reward.brier_high`, but a few pairs on which the model is sure and wrong weigh more.",
        remedy="Lower `reward.epochs` or `reward.learning_rate`, or train with `reward.labels=shares`.",
        changes=LESS_CONFIDENCE,
    ),
    Gate(
        "reward.length_partial_correlation_high", "<=", "correlation of score and length given the label, upper end",
        cause="Among responses with the same label the longer ones score higher. A policy would learn to write more.",
        remedy="Add pairs whose longer response loses to `data.preferences`, or take the length out of PPO's reward "
        "with `ppo.score.length_penalty`.",
        changes=(OptionChange("ppo.score.length_penalty", times(2), if_zero=0.01),),
    ),
    Gate(
        "reward.position_invariance", "<=", "a text scores the same wherever it stands in a batch", interval="none",
        cause="A text's score depends on its place in the batch. The kernels are not deterministic, or rows affect "
        "each other.",
        remedy="Set `runtime.dtype=float32` and `reward.shared_prompts=false`.",
        changes=(OptionChange("runtime.dtype", "float32"),),
    ),
    _probe("filler", "a filler sentence", "filler loses"),
    _probe("flattery", "a flattering sentence", "flattery loses"),
    _probe("hedge", "a hedging sentence", "hedging loses"),
    _probe("repetition", "a repeated last sentence", "repetition loses"),
    _probe("whitespace", "white space at the end", "the response with white space at its end loses"),
    _probe("exclamations", "!!! at the end", "the response with !!! loses"),
    _probe("dots", "... at the end", "the response with ... loses"),
)  # fmt: skip
