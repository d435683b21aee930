"""The contract on rows: allowed values of the measured columns, as Great Expectations expectations.

The columns are those of `data_contracts.rows.columns`. A check is one or more expectations. `data.checks` sets its
severity and threshold; other limits come from other options.
"""

from collections.abc import Collection, Iterator
from typing import Any

from components.data.checks_config import STOPPED
from components.data.config import OWN_MINIMUM, DataConfig
from components.data.inputs import DECONTAMINATE, REFERENCE
from components.models.config import GenerationConfig
from data_contracts.expectations.suites import Check, check_of

_ONLY = (
    (("preferences",), {"prompts_agree", "responses_differ", "votes_valid", "votes_once", "decided",
                        "differ_truncated"}),
    (("demonstrations",), {"desirable"}),
    (("preferences", "demonstrations"), {"consistent", "no_placeholder", "template_agrees", "response_fits"}),
)  # fmt: skip
"""Kinds of data, and the checks that apply only to them."""
_STAY = ("votes_once", "desirable")
ROLES = "^s?a?(?:ua)*u$"
"""Allowed roles of a prompt, one letter for each message: an optional system message, then user and assistant
alternate, and the last is the user's."""


def row_checks(
    data: DataConfig, generation: GenerationConfig | None, source: str, comparisons: Collection[str] = ()
) -> list[Check]:
    """Return the expectations on the rows of a source (`preferences`, `demonstrations`, `prompts`).

    Args:
        generation: the limits in tokens; None leaves out the checks that need a tokenizer.
        comparisons: which comparisons apply: `decontaminate`, `reference` or both.
    """
    left_out = {name for kinds, names in _ONLY if source not in kinds for name in names}
    checks = data.checks
    if source == "demonstrations":  # raters who disagree leave SFT a response that it may learn, but KTO no label of it
        checks = checks.model_copy(update={"consistent": checks.consistent.model_copy(update={"severity": "warn"})})
    return [
        check_of(checks, name, kind, options, name in _STAY and "reading" not in options.values())
        for name, kind, options in _table(data, generation, comparisons)
        if name not in left_out
    ]


def _table(
    data: DataConfig, generation: GenerationConfig | None, comparisons: Collection[str]
) -> Iterator[tuple[str, str, Any]]:
    yield from ((name, *_not("reading", reading)) for name, reading in STOPPED.items())
    yield "roles_alternate", "ExpectColumnValuesToMatchRegex", {"column": "roles", "regex": ROLES}
    yield "texts_filled", *_at_most("empty_texts", 0)
    yield "responses_differ", *_at_least("distinct_responses", 2)
    yield "text_clean", *_at_most("unclean_texts", 0)
    yield "desirable", "ExpectColumnValuesToBeInSet", {"column": "desirable", "value_set": [1]}
    yield "votes_once", *_at_most("repeated_votes", 0)
    yield "no_markers", *_at_most("marked_texts", 0)
    yield "no_placeholder", *_at_most("placeholder_responses", 0)
    yield "length_within", *_at_most("characters", data.max_characters)
    yield from (("decided", *expectation) for expectation in _decided(data))
    yield "consistent", *_at_most("contradictions", 0)
    yield "unique", *_at_most("copies_before", 0)
    yield "near_unique", *_at_most("near_copies_before", 0)
    if DECONTAMINATE in comparisons:
        yield "uncontaminated", *_at_most("contaminated", 0)
    if REFERENCE in comparisons:
        yield "reference_apart", *_at_most("held_out_before", 0)
    if generation is not None:
        yield "no_markers", *_at_most("special_texts", 0)
        yield "differ_truncated", *_at_least("distinct_cut_responses", 2)
        yield "template_takes", *_not("template", 1)
        yield "template_agrees", *_not("template", 2)
        yield "prompt_fits", *_at_most("prompt_tokens", generation.max_prompt_tokens)
        yield "response_fits", *_at_most("response_tokens", generation.max_new_tokens)


def _decided(data: DataConfig) -> Iterator[tuple[str, dict[str, object]]]:
    narrow = data.decision.margin + 1e-9 if data.decision.margin else 0.0
    yield "ExpectColumnValuesToBeBetween", {"column": "lead", "min_value": narrow, "strict_min": True}
    kind, options = _at_least("deciding_votes", data.decision.minimum or OWN_MINIMUM)
    if data.decision.minimum is None:
        ours = {"type": "comparison", "column": {"name": "given_out"}, "operator": "==", "parameter": 1}
        options |= {"row_condition": ours}
    yield kind, options
    if data.score.threshold:
        options = {"column": "margin", "min_value": data.score.threshold, "strict_min": True}
        yield "ExpectColumnValuesToBeBetween", options


def _at_most(column: str, limit: float) -> tuple[str, dict[str, object]]:
    return "ExpectColumnValuesToBeBetween", {"column": column, "max_value": limit}


def _at_least(column: str, limit: float) -> tuple[str, dict[str, object]]:
    return "ExpectColumnValuesToBeBetween", {"column": column, "min_value": limit}


def _not(column: str, value: object) -> tuple[str, dict[str, object]]:
    return "ExpectColumnValuesToNotBeInSet", {"column": column, "value_set": [value]}
