"""The checks of the data contract, with the severity and threshold of each."""

from functools import partial
from typing import Any, Literal, Self, get_args

from pydantic import Field, model_validator

from components.base.settings import Settings

Severity = Literal["error", "quarantine", "warn"]


UNUSABLE = (
    "readable", "fields_present", "turns_valid", "prompts_agree", "texts_filled", "responses_differ", "text_clean",
    "votes_valid", "decided", "desirable", "template_takes",
)  # fmt: skip
"""Row checks that a row must pass to be usable as a pair."""
OF_THE_WHOLE = (
    "every_split", "enough_pairs", "enough_test_pairs", "length_drift", "language_drift", "prompts_alike",
    "known_tokens", "deployment_length", "deployment_language", "deployment_category", "deployment_words",
    "reference_length", "reference_language", "reference_category", "reference_words", "reference_preference",
)  # fmt: skip
"""Checks of one value over all kept rows; the thresholds of all others are shares."""


class CheckConfig(Settings):
    """One check. Rows that fail a check of severity `error` or `quarantine` are left out; those of `warn` stay."""

    severity: Severity
    """`error` fails the contract beyond the threshold; `quarantine` and `warn` are only shown."""
    threshold: float
    """For a check of rows: the largest share of rows that may fail. Otherwise the limit of the check's value."""


class RangeConfig(Settings):
    """A check whose value must lie between two ends."""

    severity: Literal["error", "warn"]
    """`error` fails the contract; `warn` is only shown."""
    threshold: tuple[float, float]
    """The two ends."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        low, high = self.threshold
        if not low <= high:
            raise ValueError(f"the threshold's ends {low:g} and {high:g} are the wrong way round")
        return self


def _check(severity: Severity, threshold: float) -> CheckConfig:
    return CheckConfig(severity=severity, threshold=threshold)


_error, _quarantine, _warn = (partial(_check, severity) for severity in get_args(Severity))


def _within(low: float, high: float) -> RangeConfig:
    return RangeConfig(severity="warn", threshold=(low, high))


class _CheckSettings(Settings):
    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, checks: Any) -> Any:
        """Fill up a check that is given in part from its default."""
        if not isinstance(checks, dict):
            return checks
        out = dict(checks)
        for name in checks.keys() & cls.model_fields.keys():
            if isinstance(checks[name], dict):
                out[name] = cls.model_fields[name].default.model_dump() | checks[name]
        return out

    @model_validator(mode="after")
    def _shares(self) -> Self:
        for name, check in self:
            if isinstance(check, CheckConfig) and name not in OF_THE_WHOLE and not 0 <= check.threshold <= 1:
                raise ValueError(
                    f"{name}.threshold is {check.threshold:g}, but it is the share of rows that may fail: give 0 to 1, "
                    "as 0.05 for 5 in 100"
                )
        return self


class RowChecks(_CheckSettings):
    """The checks of single rows, including those that need other rows or the tokenizer."""

    readable: CheckConfig = _error(0.05)
    """The row is a JSON object in UTF-8 with one cell for each column."""
    fields_present: CheckConfig = _error(0.05)
    """Every field of the format is there and of the right type."""
    turns_valid: CheckConfig = _error(0.05)
    """A prompt comes before, and the assistant's response last."""
    roles_alternate: CheckConfig = _quarantine(0.05)
    """A system message stands first or nowhere, then user and assistant take turns, and the user asks last."""
    prompts_agree: CheckConfig = _error(0.05)
    """Chosen and rejected response answer the same prompt."""
    texts_filled: CheckConfig = _error(0.05)
    """No response and no prompt turn is empty, or holds nothing that a reader would see."""
    responses_differ: CheckConfig = _error(0.05)
    """The two responses differ."""
    text_clean: CheckConfig = _error(0.05)
    """No control characters, no broken UTF-8, and no U+FFFD, which a decoder leaves where the encoding was wrong."""
    votes_valid: CheckConfig = _error(0.05)
    """Votes are counts of known answers, and the chosen response has the most, and no lower score."""
    desirable: CheckConfig = _quarantine(1)
    """A demonstration with a label (KTO's `label` or `kto_tag`, or a flag such as `is_safe`) is labelled desirable.
    Others are not imitated."""
    votes_once: CheckConfig = _error(0.05)
    """No annotator votes twice on a pair. The first vote counts, and the pair stays. The threshold is a share of the
    votes."""
    consistent: CheckConfig = _error(0.05)
    """No other row prefers the same two responses the other way."""
    no_markers: CheckConfig = _quarantine(0.05)
    """No special token of the tokenizer and no marker of a chat template stands in a text."""
    no_placeholder: CheckConfig = _quarantine(0.05)
    """No response is a missing value written as text (nan, None, #NAME?), or an error of a program or an API. Where
    these are right answers, set the severity to warn."""
    differ_truncated: CheckConfig = _quarantine(0.05)
    """The two responses still differ once cut to generation.max_new_tokens."""
    length_within: CheckConfig = _quarantine(0.05)
    """Prompt and response are no longer than data.max_characters."""
    unique: CheckConfig = _quarantine(0.05)
    """The row repeats no other."""
    decided: CheckConfig = _quarantine(0.05)
    """The votes have a majority (the rows without one stand in review.jsonl, for experts)."""
    near_unique: CheckConfig = _warn(0.05)
    """The row nearly repeats no earlier one (MinHash over words, or over characters of scripts without spaces;
    data.near_duplicate)."""
    uncontaminated: CheckConfig = _quarantine(0.05)
    """The prompt nearly repeats no prompt of data.decontaminate."""
    reference_apart: CheckConfig = _quarantine(0.05)
    """The prompt of a row for training nearly repeats no held-out prompt of data.reference, on which models of both
    data are compared."""
    template_takes: CheckConfig = _error(0.05)
    """The tokenizer's chat template takes the prompt: some refuse or leave out a system message."""
    template_agrees: CheckConfig = _error(0.05)
    """The chat template renders the conversation as its prompt, the response and EOS: some drop part of a text."""
    prompt_fits: CheckConfig = _warn(0.1)
    """The prompt is within generation.max_prompt_tokens; a longer one loses its oldest turns."""
    response_fits: CheckConfig = _warn(0.1)
    """The responses are within generation.max_new_tokens, EOS included. SFT leaves a longer one out (sft.overlong); in
    a pair it is cut and has no EOS."""

    @model_validator(mode="after")
    def _unusable_rows_go(self) -> Self:
        for name in UNUSABLE:
            if getattr(self, name).severity == "warn":
                raise ValueError(f"{name}.severity is warn, but a row that fails it can't be used: make it quarantine")
        return self


class SetChecks(_CheckSettings):
    """The checks of what is left after quarantine, as a whole."""

    no_leak: CheckConfig = _error(0)
    """No prompt stands in two splits."""
    every_split: CheckConfig = _error(1)
    """Train, calibration and test each have this many pairs."""
    enough_pairs: CheckConfig = _warn(500)
    """This many pairs are left after quarantine."""
    enough_test_pairs: CheckConfig = _warn(200)
    """This many of them are for testing, else intervals are wide."""
    no_near_duplicate: CheckConfig = _warn(0)
    """At most this share of held-out pairs has a prompt that is nearly a training prompt (data.near_duplicate, or equal
    but for case, punctuation and white space)."""
    length_preference: RangeConfig = _within(0.2, 0.8)
    """Share of pairs in which the longer response (in words) wins; outside, length alone explains much."""
    label_position: RangeConfig = _within(0.4, 0.6)
    """Share of pairs in which the response shown first wins."""
    length_drift: CheckConfig = _warn(0.1)
    """Largest difference of the distributions of response length (in tokens) in train and held-out splits
    (Kolmogorov-Smirnov; what chance alone exceeds in 5 of 100 draws is allowed)."""
    language_drift: CheckConfig = _warn(0.1)
    """Total variation distance of the languages of train and held-out splits (what chance alone exceeds in 5 of 100
    draws is allowed)."""
    prompts_alike: CheckConfig = _warn(0.65)
    """How well a classifier tells preference prompts from the prompts PPO will use (data.prompts): area under the ROC
    curve, 0.5 is not at all (what chance alone exceeds in 5 of 100 draws is allowed)."""
    deployment_length: CheckConfig = _warn(0.2)
    """Largest difference of the distributions of length, in words, of the preferences' prompts and of
    data.deployment_prompts (Kolmogorov-Smirnov; what chance alone exceeds in 5 of 100 draws is allowed)."""
    deployment_language: CheckConfig = _warn(0.1)
    """Total variation distance of the languages of these prompts (chance is allowed as above)."""
    deployment_category: CheckConfig = _warn(0.2)
    """Total variation distance of their categories, where both files name them (chance is allowed as above)."""
    deployment_words: CheckConfig = _warn(0.65)
    """How well a classifier on words and pairs of words tells these prompts apart: area under the ROC curve, 0.5 is not
    at all (chance is allowed as above)."""
    reference_length: CheckConfig = _warn(0.1)
    """Largest difference of the distributions of response length, in words, in these pairs and in those of
    data.reference (Kolmogorov-Smirnov; what chance alone exceeds in 5 of 100 draws is allowed)."""
    reference_language: CheckConfig = _warn(0.1)
    """Total variation distance of the languages of both data's responses (chance is allowed as above)."""
    reference_category: CheckConfig = _warn(0.2)
    """Total variation distance of both data's categories, where both name them (chance is allowed as above)."""
    reference_words: CheckConfig = _warn(0.65)
    """How well a classifier on words and pairs of words tells the prompts of both data apart: area under the ROC curve,
    0.5 is not at all (chance is allowed as above)."""
    reference_preference: CheckConfig = _warn(0.1)
    """Difference of the shares of pairs in which the longer response wins (chance is allowed as above): annotators
    whose taste has changed."""
    known_tokens: CheckConfig = _warn(0.01)
    """Share of unknown tokens in the kept texts."""


class ChecksConfig(RowChecks, SetChecks):
    """Every check of the data contract: `--set data.checks.length_preference.severity=error`."""


class NearDuplicateConfig(Settings):
    """What a near-duplicate is: sets of runs of words whose Jaccard similarity, estimated by MinHash (Broder 1997; 64
    permutations: standard error 0.04 at 0.9), is at least `jaccard`."""

    jaccard: float = Field(0.9, gt=0, le=1)
    """Least similarity."""
    words: int = Field(3, ge=1)
    """Words in a run. In scripts without spaces between words, such as Chinese and Thai, each character is a word, and
    so is each emoji."""
