"""The contract as Great Expectations suites over narrow frames of derived columns: no text ever reaches a report.

Great Expectations takes seconds to import, so it is imported where it is used. It reports nothing to anyone: its
analytics are switched off before the import.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from numbers import Real
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from components.base.errors import CheckFailed
from components.data.checks_config import CheckConfig, ChecksConfig, RangeConfig, RowChecks, Severity, SheetChecks

if TYPE_CHECKING:
    import pandas as pd

FIRST_ROWS = 10
"""How many of a check's rows pages for people name."""
_SEVERITY = {"error": "critical", "quarantine": "warning", "warn": "info"}


@dataclass(frozen=True)
class Check:
    """One expectation: on which column, what it asks, and what its failure means."""

    name: str
    column: str
    description: str
    severity: Severity
    threshold: float | tuple[float, float]
    kind: str
    options: Mapping[str, object]


class JudgedCheck(TypedDict):
    """What a check found: an entry of `report.json`, and of what `tether data check --json` prints."""

    name: str
    suite: str
    source: NotRequired[str]
    description: str
    severity: Severity
    rows: int
    """How many fail, each ranking once."""
    row_numbers: list[int]
    """Of those rows; empty where there are several files."""
    rows_by_file: NotRequired[dict[str, list[int]]]
    """The numbers of those rows in each file, where there are several."""
    threshold: float | list[float]
    value: float | None
    """Of a check of rows the share that fails, else what was measured."""
    passed: bool
    interval: NotRequired[list[float]]


_PAIRS_ONLY = {
    "prompts_agree", "responses_differ", "votes_valid", "votes_once", "consistent", "decided", "differ_truncated"
}  # fmt: skip
_DEMONSTRATIONS_ONLY = {"desirable"}
_TOKENS_ONLY = {"differ_truncated", "template_takes", "template_agrees", "prompt_fits", "response_fits"}
_RESPONSES_ONLY = {"template_agrees", "response_fits"}


def row_checks(checks: ChecksConfig, source: str, tokenized: bool = True) -> list[Check]:
    """The checks of the rows of a source (`preferences`, `demonstrations`, `prompts`).

    Each passes while at most its threshold's share of the rows fail it.
    """
    left_out = set() if tokenized else set(_TOKENS_ONLY)
    if source != "preferences":
        left_out |= _PAIRS_ONLY
    if source != "demonstrations":
        left_out |= _DEMONSTRATIONS_ONLY
    if source == "prompts":
        left_out |= _RESPONSES_ONLY
    return [_check(checks, name) for name in RowChecks.model_fields if name not in left_out]


def pair_checks(checks: ChecksConfig, frame: "pd.DataFrame") -> list[Check]:
    """The checks of the pairs that are kept and split; those of a mean only where `frame` has values for it."""
    found = [
        _check(checks, "no_leak", "splits_of_prompt", passing=1),
        _check(checks, "no_near_duplicate", "near_training", passing=0.0),
        _check(checks, "length_preference", "longer_wins"),
        _check(checks, "label_position", "first_wins"),
    ]
    return [check for check in found if frame[check.column].notna().any()]


def sheet_checks(checks: ChecksConfig) -> list[Check]:
    """The checks of a rating sheet: of its rows, and of the side that the ratings are for."""
    return [_check(checks, name) for name in SheetChecks.model_fields]


_AT_LEAST = ("every_split", "enough_pairs", "enough_test_pairs")


def measure_checks(checks: ChecksConfig, chance: Mapping[str, float]) -> list[Check]:
    """The checks of measures of the whole: `chance` is, by check, what chance alone may reach."""
    out = []
    for name, by_chance in chance.items():
        limit = getattr(checks, name).threshold
        ends = {"min_value": limit} if name in _AT_LEAST else {"max_value": max(limit, by_chance)}
        out.append(replace(_check(checks, name), kind="ExpectColumnMaxToBeBetween", options=ends))
    return out


def _check(checks: ChecksConfig, name: str, column: str = "", passing: object = True) -> Check:
    """The check `name` of a column (of its own name where none is given): of its mean, or of rows, which should hold
    `passing`."""
    asked: CheckConfig | RangeConfig = getattr(checks, name)
    description = (ChecksConfig.model_fields[name].description or "").replace("\n", " ")
    options: dict[str, object]
    if isinstance(asked, RangeConfig):
        kind, (low, high) = "ExpectColumnMeanToBeBetween", asked.threshold
        options = {"min_value": low, "max_value": high}
    else:
        kind, options = "ExpectColumnValuesToBeInSet", {"value_set": [passing], "mostly": 1 - asked.threshold}
    return Check(name, column or name, description, asked.severity, asked.threshold, kind, options)


_NAMING_A_ROW = ("file", "row_id")
"""Columns of a frame."""


@dataclass(frozen=True)
class Suite:
    """Checks and the frame that they judge (columns `row_id`, of several files `file`, and those the checks name)."""

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


def judge(made: Any, suite: Suite) -> list[JudgedCheck]:
    """Run `suite` in the context `made`."""
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
        "result_format": "COMPLETE", "exclude_unexpected_values": True,
        "unexpected_index_column_names": [name for name in _NAMING_A_ROW if name in suite.frame],
    }  # fmt: skip
    found = definition.run(batch_parameters={"dataframe": suite.frame}, result_format=shown)
    by_name = {result.expectation_config.meta["check"]: result for result in found.results}
    return [_outcome(suite.name, check, by_name[check.name]) for check in suite.checks]


def first_rows(check: JudgedCheck) -> str:
    """The first row numbers of a check for people."""
    by_file = check.get("rows_by_file", {})
    if not by_file:
        return _first(check["row_numbers"])
    return "; ".join(f"{file}: {_first(numbers)}" for file, numbers in by_file.items())


def _first(numbers: Sequence[int]) -> str:
    more = f" … {len(numbers) - FIRST_ROWS} more" if len(numbers) > FIRST_ROWS else ""
    return ", ".join(map(str, numbers[:FIRST_ROWS])) + more


def _outcome(suite: str, check: Check, result: Any) -> JudgedCheck:
    info = result.exception_info or {}
    for raised in [info] if "raised_exception" in info else info.values():  # one, or one for each metric that failed
        if raised["raised_exception"]:
            raise CheckFailed(f"Great Expectations could not judge {check.name}: {raised['exception_message']}")
    found = result.result
    bad: dict[str, set[int]] = {}  # of one file by the name ""
    for group in found.get("unexpected_index_list") or ():
        for number, file in zip(group["row_id"], group.get("file") or repeat(""), strict=False):
            bad.setdefault(file, set()).add(int(number))
    by_file = {file: sorted(numbers) for file, numbers in sorted(bad.items())}
    count = int(found.get("unexpected_count", 0))
    of = int(found.get("element_count", 0) or 0) - int(found.get("missing_count", 0) or 0)
    value = found.get("observed_value")
    if "unexpected_count" in found:
        value = count / of if of else 0.0
    outcome: JudgedCheck = {
        "name": check.name, "suite": suite, "description": check.description, "severity": check.severity,
        "threshold": list(check.threshold) if isinstance(check.threshold, tuple) else check.threshold,
        "value": round(float(value), 6) if isinstance(value, Real) else None,
        "rows": sum(map(len, by_file.values())), "row_numbers": by_file.pop("", []), "passed": bool(result.success),
    }  # fmt: skip
    if by_file:
        outcome["rows_by_file"] = by_file
    return outcome
