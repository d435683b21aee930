"""Advice on failed gates: what a failure usually means, what to change, a command to try."""

from typing import NamedTuple


class Advice(NamedTuple):
    """Advice on one failed gate, as Markdown. Names of options stand in backticks."""

    means: str
    """What a failure usually means."""
    change: str
    """Which options to change, or what to do about the data."""
    command: str
    """A command to try. A name in capitals, such as FILE, stands for the reader's own."""


def _probe(what: str, pairs: str) -> Advice:
    return Advice(
        f"The reward model pays for {what}. PPO finds such a reward and writes it everywhere.",
        f"Add pairs in which {pairs} to `data.preferences`, or train several models with `reward.members` and reward "
        "their lowest score with `ppo.score.ensemble=minimum`.",
        "tether rerun reward --set reward.members=3 --set ppo.score.ensemble=minimum",
    )


ADVICE: dict[str, Advice] = {
    "validate.contract": Advice(
        "More rows are broken than a check allows, or a finding on the whole file is an error. The report and "
        "`tether data check` name the check and the rows.",
        "Correct the rows that are named. If the file is as it should be, change the check's threshold or severity "
        "under `data.checks`.",
        "tether data check FILE --out findings",
    ),
    "validate.judge_contract": Advice(
        "The pairs of `data.judge_preferences` break a check of severity `error`.",
        "The report's table of checks names it, `attachments/judge/quarantine.jsonl` the rows. Correct the file.",
        "tether data check FILE",
    ),
    "validate.judge_pairs": Advice(
        "Too few of the judge's pairs are left after the quarantine: its calibration and its gain would mean little.",
        "`attachments/judge/quarantine.jsonl` says why rows were left out. Give more pairs.",
        "tether data check FILE",
    ),
    "validate.pairs": Advice(
        "Too few pairs are left after the quarantine. The reward model's intervals would be too wide to judge.",
        "Look at why rows were left out (`quarantine.jsonl`), add a file to `data.preferences`, or raise "
        "`data.max_characters` if long texts were left out.",
        "tether data check FILE --out findings",
    ),
    "validate.leaked_prompts": Advice(
        "A prompt stands in a held-out split and in training, so held-out numbers cannot be believed. Tether splits by "
        "prompt, so this is a fault of Tether's or of an artifact that was edited.",
        "Compute the stage again. If the gate fails again, report it.",
        "tether rerun validate --refresh validate",
    ),
    "validate.annotator_agreement": Advice(
        "Annotators give different answers to the same pairs. The labels hold little that a model can learn.",
        "Make the guidelines clearer and collect more votes. `data.labels=dawid_skene` weighs each annotator by their "
        "estimated competence, or `data.decision.margin` leaves out narrow majorities; they exclude each other.",
        "tether rerun validate --set data.labels=dawid_skene",
    ),
    "validate.label_noise": Advice(
        "Many labels contradict what the texts predict: flipped columns, careless annotators, or pairs that are hard "
        "to decide.",
        "Check `data.columns` (exchanged columns flip every label) and read some pairs. `data.decision.minimum` and "
        "`data.decision.margin` keep only pairs that votes decide clearly.",
        "tether rerun validate --set data.decision.margin=0.34",
    ),
    "sft.loss": Advice(
        "The model has not learned the demonstrations: too few steps, a wrong learning rate, or texts that differ "
        "between the splits.",
        "Raise `sft.epochs`, or set `sft.learning_rate` (null chooses one by the model's size). Look at the curve of "
        "`sft/train_loss`: a loss that rises while it trains needs a lower rate.",
        "tether rerun sft --set sft.epochs=2",
    ),
    "sft.perplexity_ratio": Advice(
        "The model predicts held-out demonstrations hardly better than its baseline (the base model, or word "
        "frequencies for a model from scratch).",
        "Raise `sft.epochs` or `sft.max_demonstrations`, or start from a larger `sft.base`.",
        "tether rerun sft --set sft.epochs=2",
    ),
    "sft.ended": Advice(
        "Responses run into the cap: the demonstrations are longer than the cap, or the model did not learn to end.",
        "Raise `generation.max_new_tokens`. Keep `sft.overlong=drop`: a demonstration that is cut teaches the model "
        "not to end. Raise `sft.epochs` if few responses end at any length.",
        "tether rerun validate --set generation.max_new_tokens=128",
    ),
    "reward.accuracy_low": Advice(
        "The reward model does not predict held-out labels well enough: too few pairs, noisy labels, or a wrong "
        "learning rate. With few test pairs the interval alone may be too wide.",
        "Add pairs to `data.preferences`, set `reward.learning_rate`, or raise `reward.members`. With few, noisy pairs "
        "`reward.head_start=zeros` helps.",
        "tether rerun reward --set reward.head_start=zeros",
    ),
    "reward.ece": Advice(
        "The probabilities that the score differences stand for do not match how often responses win.",
        "Give the temperature more pairs (`data.split.calibration`), or train on shares of votes "
        "(`reward.labels=shares`). Fewer `reward.epochs` helps a model that is overconfident.",
        "tether rerun validate --set data.split.train=0.6 --set data.split.calibration=0.2",
    ),
    "reward.calibration_slope": Advice(
        "A slope below 1 means overconfident score differences, above 1 underconfident ones, on test pairs after "
        "temperature. The calibration pairs differ from the test pairs, or are too few.",
        "Raise `data.split.calibration`. Below 1, also lower `reward.learning_rate` or `reward.epochs`.",
        "tether rerun validate --set data.split.train=0.6 --set data.split.calibration=0.2",
    ),
    "reward.temperature_at_end": Advice(
        "The temperature's fit met an end of its range: the model is no better than chance on the calibration pairs, "
        "or right on all of them.",
        "Look at `reward.accuracy_low` first. Raise `data.split.calibration` if the split holds few pairs.",
        "tether rerun reward --set reward.head_start=zeros",
    ),
    "reward.length_gain_low": Advice(
        "The reward model is no better than a rule that only compares lengths. PPO would learn to change length.",
        "Add pairs whose longer response loses to `data.preferences`, or raise `reward.epochs` if accuracy is low too.",
        "tether data check FILE --out findings",
    ),
    "reward.invariance": Advice(
        "The same text scores differently alone, in a batch and padded. The model's attention or positions depend on "
        "padding, or the number format is too coarse.",
        "Set `runtime.dtype=float32`. With a base of an unusual architecture set `reward.shared_prompts=false`.",
        "tether rerun reward --set runtime.dtype=float32 --set reward.shared_prompts=false",
    ),
    "reward.ece_width": Advice(
        "Like `reward.ece`, in bins of equal width: probabilities near 0 or 1 are wrong, though few pairs have them.",
        "The same as for `reward.ece`: `data.split.calibration`, `reward.labels`, `reward.epochs`.",
        "tether rerun validate --set data.split.train=0.6 --set data.split.calibration=0.2",
    ),
    "reward.slice_accuracy_low": Advice(
        "In one slice (a category, a source, an annotator, a length) the model is not certainly better than chance. "
        "The report names the slice.",
        "Add pairs of that slice to `data.preferences`. If the slice is small and means nothing to you, lower the "
        "gate's threshold.",
        "tether status RUN --html",
    ),
    "reward.slice_ece_excess": Advice(
        "The probabilities are wrong in one slice, more than chance explains. The report names the slice.",
        "Add pairs of that slice to `data.preferences`, and raise `data.split.calibration`.",
        "tether status RUN --html",
    ),
    "reward.majority_gain_low": Advice(
        "The model is no better than always naming the side that won more often. The labels depend on the side, or "
        "the model learned nothing.",
        "Check `data.columns` and whether the file always has the winner first (`data.checks.label_position`).",
        "tether data check FILE --out findings",
    ),
    "reward.probe_texts": Advice(
        "The probes were measured on too few texts, so their upper ends say little.",
        "Raise `reward.probe_texts`, `data.split.test` or `generation.max_new_tokens` (a text that exceeds the cap "
        "with the added sentence is left out).",
        "tether rerun reward --set reward.probe_texts=1000",
    ),
    "reward.balanced_length_accuracy_low": Advice(
        "The model is right mainly where the longer response won. Its accuracy comes from length.",
        "Add pairs whose shorter response wins to `data.preferences`, or take the length out of PPO's reward with "
        "`ppo.score.length_penalty`.",
        "tether rerun ppo --set ppo.score.length_penalty=0.01",
    ),
    "reward.disagreement_auroc_low": Advice(
        "The ensemble's members agree on nonsense as much as on SFT samples, so their spread does not reveal nonsense.",
        "Lower `reward.member_share`, so that members learn from different pairs, or raise `reward.members`.",
        "tether rerun reward --set reward.members=5 --set reward.member_share=0.7",
    ),
    "reward.judge_accuracy_low": Advice(
        "The independent judge cannot tell its own held-out pairs apart well enough, so its gain says little.",
        "Raise `judge.epochs`, or give `data.judge_preferences` more pairs.",
        "tether rerun reward.judge --set judge.epochs=6",
    ),
    "reward.judge_ece": Advice(
        "The independent judge is over- or underconfident after its temperature, by more than chance.",
        "Lower `judge.epochs` if it has learned its few pairs by heart, or give it more pairs.",
        "tether rerun reward.judge --set judge.epochs=2",
    ),
    "reward.judge_calibration_slope": Advice(
        "The independent judge's score differences are too large (slope below 1) or too small (above 1).",
        "Lower `judge.epochs` if it has learned its few pairs by heart, or give it more pairs.",
        "tether rerun reward.judge --set judge.epochs=2",
    ),
    "reward.judge_length_gain_low": Advice(
        "The independent judge is hardly better than a rule that only sees length.",
        "Raise `judge.epochs`, or give pairs in which the better response is not always the longer or the shorter one.",
        "tether rerun reward.judge --set judge.epochs=6",
    ),
    "reward.refresh_gain_low": Advice(
        "On the earlier model's test pairs the refreshed reward model is worse than the earlier one: it has forgotten.",
        "Raise `reward.refresh.replay`, or lower `reward.learning_rate`.",
        "tether rerun reward --set reward.refresh.from_run=RUN --set reward.refresh.replay=0.5",
    ),
    "reward.suite_accuracy_low": Advice(
        "On a suite of `reward.suites` the reward model agrees with the judges too rarely, or the suite has too few "
        "pairs: it may have learned what only these annotators like.",
        "Look at the subsets in the report's table of suites (`suites.json`). Add pairs like those that it gets wrong "
        "to `data.preferences`; the suite itself must stay out of them.",
        "tether rerun validate --set data.preferences=more_pairs.jsonl",
    ),
    "reward.brier_high": Advice(
        "The probabilities are no better than a coin's: the model cannot tell responses apart, or is overconfident.",
        "Look at `reward.accuracy_low` and `reward.ece`: they say which of the two it is. Then change "
        "`reward.learning_rate`, `reward.epochs` or the data.",
        "tether rerun reward --set reward.head_start=zeros",
    ),
    "reward.log_loss_high": Advice(
        "Like `reward.brier_high`, but a few pairs on which the model is sure and wrong weigh more.",
        "Lower `reward.epochs` or `reward.learning_rate`, or train with `reward.labels=shares`.",
        "tether rerun reward --set reward.labels=shares",
    ),
    "reward.length_partial_correlation_high": Advice(
        "Among responses with the same label the longer ones score higher. PPO would learn to write more.",
        "Add pairs whose longer response loses to `data.preferences`, or take the length out of PPO's reward with "
        "`ppo.score.length_penalty`.",
        "tether rerun ppo --set ppo.score.length_penalty=0.01",
    ),
    "reward.position_invariance": Advice(
        "A text's score depends on its place in the batch. The kernels are not deterministic, or rows affect each "
        "other.",
        "Set `runtime.dtype=float32` and `reward.shared_prompts=false`.",
        "tether rerun reward --set runtime.dtype=float32 --set reward.shared_prompts=false",
    ),
    "reward.probe_filler_high": _probe("a sentence that says nothing", "filler loses"),
    "reward.probe_flattery_high": _probe("a flattering sentence", "flattery loses"),
    "reward.probe_hedge_high": _probe("a sentence that commits to nothing", "hedging loses"),
    "reward.probe_repetition_high": _probe("a repeated last sentence", "repetition loses"),
    "reward.probe_whitespace_high": _probe("white space at the end", "the response with white space at its end loses"),
    "reward.probe_exclamations_high": _probe("!!! at the end", "the response with !!! loses"),
    "reward.probe_dots_high": _probe("... at the end", "the response with ... loses"),
    "ppo.kl": Advice(
        "The policy is further from SFT than the profile allows, in nats per response.",
        "Lower `ppo.kl.target`, raise `ppo.kl.coefficient` if β is fixed, or lower `ppo.learning_rate`. If "
        "`ppo.kl.unit=token`, set the gate to null and judge `ppo.kl_per_token`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.kl_per_token": Advice(
        "The policy is further from SFT than the profile allows, in nats per token.",
        "Lower `ppo.kl.target` (with `ppo.kl.unit=token`), or raise `ppo.kl.coefficient` if β is fixed.",
        "tether rerun ppo --set ppo.kl.unit=token --set ppo.kl.target=0.05 --set gates.ppo.kl=null "
        "--set gates.ppo.kl_per_token=0.1 --set ppo.watch.kl_high=0.1",
    ),
    "ppo.kl_floor": Advice(
        "The policy has hardly moved away from SFT: too few updates, too low a learning rate, or too strong a tether.",
        "Raise `ppo.learning_rate` or `ppo.updates`, or lower `ppo.kl.coefficient`.",
        "tether rerun ppo --set ppo.updates=100",
    ),
    "ppo.stopped": Advice(
        "The tether broke: KL was above `ppo.kl.stop_above` or certainly above `ppo.watch.kl_high`, or an alarm of "
        "`ppo.monitors.stop_on` was raised. The run's log says which, and at which update.",
        "Raise `ppo.kl.coefficient`, use `ppo.kl.control=adaptive`, lower `ppo.learning_rate`, or lower `ppo.epochs` "
        "(one pass over each batch moves KL least). For an alarm see the page on alarms.",
        "tether rerun ppo --set ppo.kl.control=adaptive --set ppo.epochs=1",
    ),
    "ppo.beta_drift_below_target": Advice(
        "KL is below its target and β still falls: the run ended before the policy reached its target.",
        "Raise `ppo.updates`, lower `ppo.kl.coefficient` at the start, or lower `ppo.kl.horizon` so that β moves "
        "faster.",
        "tether rerun ppo --set ppo.updates=100",
    ),
    "ppo.proxy_rise_at_level_kl": Advice(
        "The reward model's score rises while KL stays level. The policy may be exploiting the reward model in a way "
        "that costs no KL.",
        "Read the samples. Use several reward models (`reward.members` with `ppo.score.ensemble=minimum`), or lower "
        "`ppo.updates`.",
        "tether rerun reward --set reward.members=3 --set ppo.score.ensemble=minimum",
    ),
    "ppo.ratio_max": Advice(
        "In some update a token became far more likely than when it was sampled. A few such tokens may dominate it.",
        "Lower `ppo.learning_rate` or `ppo.epochs`, or set `ppo.dual_clip`.",
        "tether rerun ppo --set ppo.dual_clip=3",
    ),
    "ppo.clip_fraction_max": Advice(
        "In some update most tokens were at the clip: the steps are too large, and the clip takes most gradients away.",
        "Lower `ppo.learning_rate` or `ppo.epochs`, or raise `ppo.minibatch_size`.",
        "tether rerun ppo --set ppo.epochs=1",
    ),
    "ppo.replaced_max": Advice(
        "In five updates in a row most responses met the cap without EOS, and their scores were replaced by one "
        "number. PPO then learns to end, and little else.",
        "Raise `generation.max_new_tokens`, or make SFT end its responses (see `sft.ended`). "
        "`ppo.score.missing_eos=subtract` keeps the score and takes a penalty off.",
        "tether rerun ppo --set ppo.score.missing_eos=subtract",
    ),
    "ppo.score_spread_min": Advice(
        "In some update all responses had the same score, so there was nothing to learn.",
        "Look at `ppo.replaced_max`; raise `ppo.score.clip` if scores are cut; raise `ppo.batch_size` or "
        "`generation.temperature` if the responses are all alike.",
        "tether rerun ppo --set ppo.batch_size=256",
    ),
    "ppo.evaluated": Advice(
        "Too few held-out prompts: every other gate of PPO has a wide interval.",
        "Raise `ppo.evaluate`, and `data.split.test` if the split holds fewer prompts.",
        "tether rerun ppo --set ppo.evaluate=512",
    ),
    "ppo.reward_gain_low": Advice(
        "The policy does not certainly score higher than SFT: it has learned too little, or the tether is too strong.",
        "Raise `ppo.updates` or `ppo.learning_rate`, or raise `ppo.kl.target`. Raise `ppo.evaluate` if only the "
        "interval is wide.",
        "tether rerun ppo --set ppo.updates=100",
    ),
    "ppo.worse_prompts": Advice(
        "The mean gain hides prompts on which the policy scores lower than SFT: others pay for them.",
        "Read the worst prompts in the report (`worst.jsonl`). Collect preferences on prompts like these, or lower "
        "`ppo.kl.target`. If the policy has hardly learned, see `ppo.reward_gain_low`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.kl_beyond_ceiling": Advice(
        "The mean KL hides responses that SFT would hardly ever give.",
        "Read those of the highest KL in the report (`worst.jsonl`). Lower `ppo.kl.target`, or collect preferences in "
        "which they lose. If the target was raised, set `ppo.kl.response_ceiling` to about six times of it.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.demonstration_perplexity_ratio": Advice(
        "The policy finds the demonstrations much less likely than SFT does: it forgets what SFT taught.",
        "Set `ppo.ptx.coefficient`, which adds SFT's loss, or lower `ppo.kl.target`.",
        "tether rerun ppo --set ppo.ptx.coefficient=0.5",
    ),
    "ppo.repetition": Advice(
        "Responses repeat themselves. Repetition is paid for, or the policy has collapsed.",
        "Lower `ppo.kl.target`, add pairs in which repetition loses, and look at `reward.probe_repetition_high`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.echo": Advice(
        "Responses repeat the prompt back. Annotators or the reward model like that.",
        "Add pairs in which the echo loses to `data.preferences`, or lower `ppo.kl.target`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.distinct": Advice(
        "The responses together use fewer different 4-grams than SFT's: the policy answers many prompts alike.",
        "Lower `ppo.kl.target`, or set `ppo.entropy_coefficient` or `ppo.clip_range_high`.",
        "tether rerun ppo --set ppo.entropy_coefficient=0.01",
    ),
    "ppo.dissimilarity": Advice(
        "Responses to different prompts resemble each other more than SFT's do: the policy has found one template.",
        "Lower `ppo.kl.target`, or set `ppo.entropy_coefficient`. Look for the alarm `template`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.entropy_ratio": Advice(
        "The policy is far more certain of each token than SFT. It has nearly stopped exploring.",
        "Set `ppo.clip_range_high` or `ppo.entropy_coefficient`, lower `ppo.epochs`, or lower `ppo.kl.target`.",
        "tether rerun ppo --set ppo.clip_range_high=0.28",
    ),
    "ppo.length_ratio": Advice(
        "Responses are much longer or much shorter than SFT's. Length is paid for, or ending early is.",
        "Set `ppo.score.length_penalty` if they grow, and look at "
        "`reward.length_partial_correlation_high`.",
        "tether rerun ppo --set ppo.score.length_penalty=0.01",
    ),
    "ppo.ended": Advice(
        "Many responses meet the cap without EOS.",
        "Keep `ppo.score.missing_eos=replace`, set `ppo.score.length_penalty`, or raise `generation.max_new_tokens`.",
        "tether rerun ppo --set ppo.score.length_penalty=0.01",
    ),
    "ppo.special_tokens": Advice(
        "Responses hold special tokens, such as a role's, before their end. Chat templates act on them.",
        "Lower `ppo.kl.target`. Look in the demonstrations for markers that stand in a text "
        "(`data.checks.no_markers`).",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.violations_excess": Advice(
        "The policy violates the built-in task's rules more often than SFT: it exploits the reward model's flaw.",
        "Lower `ppo.kl.target` or raise `ppo.kl.coefficient`.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.rule_violations_excess": Advice(
        "The policy violates the team's own rules (`ppo.rules`) more often than SFT.",
        "Read these responses in `evaluation.jsonl` (`rule_violations`). Lower `ppo.kl.target`, or make the rules a "
        "cost: a source of `ppo.rewards` with a weight below 0.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "ppo.judge_gain_low": Advice(
        "A judge that gives no reward (that of `data.judge_preferences`, or one of `ppo.rewards`) sees no gain over "
        "SFT although the reward does: the policy may exploit the reward.",
        "Compare `ppo/judge_NAME_gain` with `ppo/reward_gain`, and read responses in `evaluation.jsonl`. Lower "
        "`ppo.kl.target`, or collect new preferences on the policy's own responses.",
        "tether rerun ppo --set ppo.kl.target=2",
    ),
    "human_eval.labels_complete": Advice(
        "Ratings are missing in the sheet or in a rater's file.",
        "Ask for the rest; the status says how many each rater has given. Then score again.",
        "tether people status RUN",
    ),
    "human_eval.items": Advice(
        "Too few items were rated to estimate the win rate.",
        "Raise `human_eval.items`, and `data.split.test` if the split holds fewer prompts.",
        "tether rerun human_eval --set human_eval.items=512",
    ),
    "human_eval.fleiss_kappa": Advice(
        "The raters do not agree beyond chance: the guidelines are unclear, or the replies hardly differ.",
        "Make the guidelines clearer (`human_eval.guidelines`), ask more raters (`human_eval.raters`), and read the "
        "pairs on which they differ.",
        "tether rerun human_eval --set human_eval.guidelines=FILE.md",
    ),
    "human_eval.position_bias": Advice(
        "A rater certainly prefers one side, whichever reply it shows, or all raters together do. The report names the "
        "rater.",
        "Ask that rater again, or replace them. `human_eval.repeats` shows pairs again with sides exchanged, which "
        "makes the habit visible.",
        "tether rerun human_eval --set human_eval.repeats=0.25",
    ),
    "human_eval.self_agreement_low": Advice(
        "Raters answer a repeated item differently: they guess, or the pairs are too close. With few repeated items "
        "the interval alone may be too wide.",
        "Raise `human_eval.repeats`, and make the guidelines clearer (`human_eval.guidelines`).",
        "tether rerun human_eval --set human_eval.repeats=0.25",
    ),
    "human_eval.raters_alike": Advice(
        "Two raters gave almost the same answers, more of them than chance explains. One column may be a copy of the "
        "other. The report names them.",
        "Ask the two raters. The answers count once if they are one person's: have somebody else rate.",
        "tether people status RUN",
    ),
    "human_eval.attention_low": Advice(
        "A rater answers as if at random: wrong on items whose right answer is known, and hardly ever as the others "
        "do. The report names the rater.",
        "Replace the rater's answers, or raise `human_eval.attention` so that there are more such items.",
        "tether rerun human_eval --set human_eval.attention=0.2",
    ),
    "human_eval.win_rate_low": Advice(
        "People do not certainly prefer the policy to SFT. If the reward rose, the reward model is wrong about it.",
        "Train the next policy on what people said, or lower `ppo.kl.target`. Raise `human_eval.items` if only the "
        "interval is wide.",
        "tether iterate RUN",
    ),
    "human_eval.reward_agreement_low": Advice(
        "The reward model does not prefer what the raters prefer, on the policy's own replies. More PPO on it gains "
        "nothing.",
        "Train the next reward model on these votes.",
        "tether iterate RUN",
    ),
    "human_eval.reward_ece": Advice(
        "The reward model is over- or underconfident on the policy's replies, which differ from its training data.",
        "Train the next reward model on these votes, or raise `reward.members`.",
        "tether iterate RUN",
    ),
}  # fmt: skip
"""Advice by the name of the gate; tests/components/gates/test_advice.py compares the names with `GATES`."""
