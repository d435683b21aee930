"""Gates of the validation of preference data."""

from components.gates.gate import Gate
from components.gates.remedies import OptionChange, at_least, times

VALIDATE_GATES = (
    Gate(
        "validate.contract", ">=", "every error-severity expectation of the suite holds", "data/contract",
        interval="none",
        cause="More rows are broken than a check allows, or a finding on the whole file is an error. The report and "
        "`tether data check` name the check and the rows.",
        remedy="Correct the rows that are named. If the file is as it should be, change the check's threshold or "
        "severity under `data.checks`.",
        command="tether data check FILE --out findings",
    ),
    Gate(
        "validate.judge_contract", ">=",
        "every error-severity expectation holds on the judge's pairs", "data/judge_contract",
        interval="none", if_measured=True,
        cause="The pairs of `data.judge_preferences` break a check of severity `error`.",
        remedy="The report's table of checks names it, `attachments/judge/quarantine.jsonl` the rows. Correct the "
        "file.",
        command="tether data check FILE",
    ),
    Gate(
        "validate.judge_pairs", ">=", "enough of the judge's pairs are left after quarantine", "data/judge_pairs",
        interval="none", if_measured=True,
        cause="Too few of the judge's pairs are left after the quarantine: its calibration and its gain would mean "
        "little.",
        remedy="`attachments/judge/quarantine.jsonl` says why rows were left out. Give more pairs.",
        command="tether data check FILE",
    ),
    Gate(
        "validate.pairs", ">=", "enough pairs are left after quarantine", "data/pairs", interval="none",
        cause="Too few pairs are left after the quarantine. The reward model's intervals would be too wide to judge.",
        remedy="Look at why rows were left out (`quarantine.jsonl`), add a file to `data.preferences`, or raise "
        "`data.max_characters` if long texts were left out.",
        changes=(OptionChange("data.generator.pairs", times(2), when=("data.preferences", None)),),
        command="tether data check FILE --out findings",
    ),
    Gate(
        "validate.leaked_prompts", "<=", "no prompt is in two splits", "data/leaked_prompts", interval="none",
        cause="A prompt stands in a held-out split and in training, so held-out numbers cannot be believed. Tether "
        "splits by prompt, so this is a fault of Tether's or of an artifact that was edited.",
        remedy="Compute the stage again. If the gate fails again, report it.",
        command="tether rerun validate --refresh validate",
    ),
    Gate(
        "validate.annotator_agreement", ">=",
        "annotators agree (Fleiss' kappa), lower end", "data/annotator_agreement_low",
        cause="Annotators give different answers to the same pairs. The labels hold little that a model can learn.",
        remedy="Make the guidelines clearer and collect more votes. `data.labels=dawid_skene` weighs each annotator by "
        "their estimated competence, or `data.decision.margin` leaves out narrow majorities; they exclude each other.",
        changes=(OptionChange("data.labels", "dawid_skene"),),
    ),
    Gate(
        "validate.label_noise", "<=",
        "share of labels that are flipped, as estimated from the pairs, upper end", "data/label_noise_high",
        cause="Many labels contradict what the texts predict: flipped columns, careless annotators, or pairs that are "
        "hard to decide.",
        remedy="Check `data.columns` (exchanged columns flip every label) and read some pairs. `data.decision.minimum` "
        "and `data.decision.margin` keep only pairs that votes decide clearly.",
        changes=(OptionChange("data.decision.margin", at_least(0.34)),),
    ),
)  # fmt: skip
