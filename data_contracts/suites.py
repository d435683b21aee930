"""The contract as Great Expectations suites over narrow frames of derived columns: no text ever reaches a report.

Great Expectations takes seconds to import, so it is imported where it is used. It reports nothing to anyone: its
analytics are switched off before the import.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from components.data.splits import SPLITS
from components.errors import CheckFailed

if TYPE_CHECKING:
    import pandas as pd

FIRST_ROWS = 10
FEWEST_TEST_PAIRS = 200
_SEVERITY = {"error": "critical", "warning": "warning"}


@dataclass(frozen=True)
class Check:
    """One expectation: on which column, what it asks, and whether its failure blocks (`error`) or is only shown."""

    name: str
    column: str
    description: str
    severity: Literal["error", "warning"]
    kind: str
    options: dict[str, Any]


# A row that fails one of these is quarantined; columns of booleans, one row a source row.
ROW_CHECKS: tuple[tuple[str, str, Literal["error", "warning"]], ...] = (
    ("readable", "The row is a JSON object in UTF-8 with one cell for each column", "error"),
    ("fields_present", "Every field of the format is there and of the right type", "error"),
    ("turns_valid", "A prompt comes before, and the assistant's response last", "error"),
    ("prompts_agree", "Chosen and rejected response answer the same prompt", "error"),
    ("texts_filled", "No response and no prompt turn is empty", "error"),
    ("responses_differ", "The two responses differ", "error"),
    ("text_clean", "No control characters and no broken UTF-8", "error"),
    ("votes_valid", "Votes are counts of known answers, and the chosen response has the most", "error"),
    ("consistent", "No other row prefers the same two responses the other way", "error"),
    ("length_within", "Prompt and response are no longer than data.max_characters", "warning"),
    ("unique", "The row repeats no other", "warning"),
    ("decided", "The votes are no tie", "warning"),
)
_PAIRS_ONLY = {"prompts_agree", "responses_differ", "votes_valid", "consistent", "decided"}


def row_checks(tolerated_share: float, pairs: bool) -> list[Check]:
    """The checks of source rows; each passes while at most `tolerated_share` of the rows fail it."""
    options = {"value_set": [True], "mostly": 1 - tolerated_share}
    return [
        Check(
            name,
            name,
            f"{description} (at most {tolerated_share:.1%} of rows fail)",
            severity,
            "ExpectColumnValuesToBeInSet",
            options,
        )
        for name, description, severity in ROW_CHECKS
        if pairs or name not in _PAIRS_ONLY
    ]


def pair_checks(frame: "pd.DataFrame") -> list[Check]:
    """The checks of the pairs that are kept and split; those of a mean only where `frame` has values for it."""
    checks = [
        Check("no_leak", "splits_of_prompt", "No prompt stands in two splits", "error",
              "ExpectColumnValuesToBeInSet", {"value_set": [1]}),
        Check("every_split", "split", "Train, calibration and test each have pairs", "error",
              "ExpectColumnDistinctValuesToContainSet", {"value_set": list(SPLITS)}),
        Check("enough_test_pairs", "pairs_in_test",
              f"At least {FEWEST_TEST_PAIRS} test pairs, else intervals are wide", "warning",
              "ExpectColumnMinToBeBetween", {"min_value": FEWEST_TEST_PAIRS}),
        Check("no_near_duplicate", "near_duplicate",
              "No test prompt is a training prompt but for case, punctuation and white space", "warning",
              "ExpectColumnValuesToBeInSet", {"value_set": [False]}),
        Check("length_preference", "longer_wins",
              "The longer response (in words) wins in 20 to 80 % of pairs, else length alone explains much", "warning",
              "ExpectColumnMeanToBeBetween", {"min_value": 0.2, "max_value": 0.8}),
        Check("label_position", "first_wins", "The response shown first wins in 40 to 60 % of pairs", "warning",
              "ExpectColumnMeanToBeBetween", {"min_value": 0.4, "max_value": 0.6}),
    ]  # fmt: skip
    return [check for check in checks if frame[check.column].notna().any()]


@dataclass(frozen=True)
class Suite:
    """Checks and the frame that they judge (columns `row_id` and those the checks name)."""

    name: str
    frame: "pd.DataFrame"
    checks: Sequence[Check]


def great_expectations() -> Any:
    """The package, imported with its analytics off and without the deprecations that its import meets."""
    os.environ["GX_ANALYTICS_ENABLED"] = "False"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        import great_expectations as gx

    return gx


def context() -> Any:
    """An ephemeral context: nothing on disk, no progress bars, no usage statistics."""
    gx = great_expectations()
    from great_expectations.data_context.types.base import ProgressBarsConfig

    made = gx.get_context(mode="ephemeral")
    made.variables.progress_bars = ProgressBarsConfig(globally=False)
    return made


def judge(made: Any, suite: Suite) -> list[dict[str, Any]]:
    """Run `suite` in the context `made`.

    Returns:
        an object per check: check, suite, description, severity, rows (how many fail), first_rows (the row numbers of
        the first of them), observed (a whole-set check's value, else null), passed.
    """
    gx = great_expectations()
    expectations = [
        getattr(gx.expectations, c.kind)(
            column=c.column,
            description=c.description,
            severity=_SEVERITY[c.severity],
            meta={"check": c.name},
            **c.options,
        )
        for c in suite.checks
    ]
    asset = made.data_sources.add_pandas(suite.name).add_dataframe_asset(suite.name)
    batch = asset.add_batch_definition_whole_dataframe(suite.name)
    stored = made.suites.add(gx.ExpectationSuite(suite.name, expectations=expectations))
    definition = made.validation_definitions.add(gx.ValidationDefinition(name=suite.name, data=batch, suite=stored))
    shown = {
        "result_format": "COMPLETE", "unexpected_index_column_names": ["row_id"], "exclude_unexpected_values": True,
    }  # fmt: skip
    checkpoint = made.checkpoints.add(
        gx.Checkpoint(name=suite.name, validation_definitions=[definition], result_format=shown)
    )
    result = checkpoint.run(batch_parameters={"dataframe": suite.frame})
    by_name = {r.expectation_config.meta["check"]: r for run in result.run_results.values() for r in run.results}
    return [_outcome(suite.name, check, by_name[check.name]) for check in suite.checks]


def _outcome(suite: str, check: Check, result: Any) -> dict[str, Any]:
    info = result.exception_info or {}
    for raised in [info] if "raised_exception" in info else info.values():  # one, or one for each metric that failed
        if raised["raised_exception"]:
            raise CheckFailed(f"Great Expectations could not judge {check.name}: {raised['exception_message']}")
    found = result.result
    bad = [int(n) for group in found.get("unexpected_index_list") or () for n in group["row_id"]]
    observed = found.get("observed_value")
    return {
        "check": check.name, "suite": suite, "description": check.description, "severity": check.severity,
        "rows": int(found.get("unexpected_count", 0)), "first_rows": bad[:FIRST_ROWS],
        "observed": round(float(observed), 6) if isinstance(observed, Real) else None,
        "passed": bool(result.success),
    }  # fmt: skip
