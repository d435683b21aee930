"""Judge tables of measured columns with Great Expectations. The tables hold no text, so none appears in a report.

Great Expectations takes seconds to import, so it is imported only where it is used. Its analytics are switched off
before the import.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from components.base.errors import CheckFailed, UserError
from components.data.checks_config import OF_THE_WHOLE, CheckConfig, ChecksConfig, RangeConfig, Severity
from components.data.rows import listed

if TYPE_CHECKING:
    import pandas as pd

FIRST_ROWS = 10
"""Number of failing rows that a page lists for each check."""
SEVERITY: dict[Severity, str] = {"error": "critical", "quarantine": "warning", "warn": "info"}
"""Maps our severities to those of Great Expectations."""


@dataclass(frozen=True)
class Check:
    """One expectation: its type and options in Great Expectations' terms, and the consequence of a failure."""

    name: str
    description: str
    severity: Severity
    threshold: float | tuple[float, float]
    kind: str
    """The class name, for example `ExpectColumnValuesToBeBetween`."""
    options: Mapping[str, object]
    """The arguments of the class, such as `column`."""
    stays: bool = False
    """Whether failing rows that could be read are kept, whatever the check's severity."""
    of_user: bool = False
    """Whether it comes from a user's suite."""
    source: str = ""
    """For a user's expectation, the kind of data that it judges; empty means the preferences, or the only source
    given."""

    @property
    def columns(self) -> list[str]:
        """Return the columns that it uses, including those in its row condition."""
        named = [self.options[name] for name in ("column", "column_A", "column_B") if name in self.options]
        listed: Any = self.options.get("column_list") or self.options.get("column_set") or ()
        condition = self.options.get("row_condition")
        return list(dict.fromkeys([*map(str, named), *map(str, listed), *_names(condition)]))


def _names(condition: object) -> list[str]:
    """Return the column names in a row condition."""
    if isinstance(condition, Mapping):
        column = condition.get("column")
        column_name = [str(column["name"])] if isinstance(column, Mapping) and "name" in column else []
        return [*column_name, *(name for inner in condition.get("conditions", ()) for name in _names(inner))]
    return []


class JudgedCheck(TypedDict):
    """The result of a check: an entry of `report.json` and of the output of `tether data check --json`."""

    name: str
    suite: str
    source: NotRequired[str]
    description: str
    severity: Severity
    rows: int
    """Number of failing rows; each ranking counts once."""
    row_numbers: list[int]
    """Numbers of the failing rows; empty if there are several files."""
    rows_by_file: NotRequired[dict[str, list[int]]]
    """Numbers of the failing rows by file, if there are several files."""
    threshold: float | list[float]
    value: float | None
    """For a check on rows the share that fails; otherwise the measured value."""
    passed: bool
    interval: NotRequired[list[float]]


def pair_checks(checks: ChecksConfig, frame: "pd.DataFrame") -> list[Check]:
    """Return the checks on the selected pairs after splitting. Checks of a mean are left out if `frame` has no values
    for it."""
    checks_of_pairs = [
        _check(checks, "no_leak", "splits_of_prompt", passing=1),
        _check(checks, "no_near_duplicate", "near_training", passing=0.0),
        _check(checks, "length_preference", "longer_wins"),
        _check(checks, "label_position", "first_wins"),
    ]
    return [check for check in checks_of_pairs if frame[str(check.options["column"])].notna().any()]


_AT_LEAST = ("every_split", "enough_pairs", "enough_test_pairs")


def measure_checks(checks: ChecksConfig, chance: Mapping[str, float]) -> list[Check]:
    """Return the checks on dataset-level measures. `chance` maps a check to the value that chance alone may reach."""
    out = []
    for name, by_chance in chance.items():
        limit = getattr(checks, name).threshold
        ends = {"min_value": limit} if name in _AT_LEAST else {"max_value": max(limit, by_chance)}
        out.append(check_of(checks, name, "ExpectColumnMaxToBeBetween", {"column": name, **ends}))
    return out


def _check(checks: ChecksConfig, name: str, column: str = "", passing: object = True) -> Check:
    """Return the check `name` of a column (default: of the same name): on its mean, or on rows, which should equal
    `passing`."""
    config: CheckConfig | RangeConfig = getattr(checks, name)
    if isinstance(config, RangeConfig):
        low, high = config.threshold
        options = {"column": column or name, "min_value": low, "max_value": high}
        return check_of(checks, name, "ExpectColumnMeanToBeBetween", options)
    return check_of(checks, name, "ExpectColumnValuesToBeInSet", {"column": column or name, "value_set": [passing]})


def check_of(checks: ChecksConfig, name: str, kind: str, options: Mapping[str, object], stays: bool = False) -> Check:
    """Return an expectation of the check `name`, with its severity, threshold and description from the config.

    For row checks, the threshold is the share of rows that may fail (`mostly` = 1 - threshold).
    """
    config: CheckConfig | RangeConfig = getattr(checks, name)
    description = (ChecksConfig.model_fields[name].description or "").replace("\n", " ")
    if isinstance(config, CheckConfig) and name not in OF_THE_WHOLE:
        options = {**options, "mostly": 1 - config.threshold}
    return Check(name, description, config.severity, config.threshold, kind, options, stays)


_NAMING_A_ROW = ("file", "row_id")
"""Columns that identify a row in a frame."""


@dataclass(frozen=True)
class Suite:
    """Checks and the frame that they judge. It has the columns `row_id`, `file` (with several files), and those of the
    checks."""

    name: str
    frame: "pd.DataFrame"
    checks: Sequence[Check]


def great_expectations() -> Any:
    """Return the package, imported with analytics off and its deprecation warnings hidden."""
    os.environ["GX_ANALYTICS_ENABLED"] = "False"
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        import great_expectations as gx

    return gx


def context() -> Any:
    """Return an ephemeral context: it writes nothing to disk, shows no progress bars and sends no usage statistics."""
    gx = great_expectations()
    from great_expectations.data_context.types.base import ProgressBarsConfig

    made = gx.get_context(mode="ephemeral")
    made.variables.progress_bars = ProgressBarsConfig(globally=False)
    return made


class ExpectationResult(NamedTuple):
    """The result of one expectation."""

    check: Check
    success: bool
    named: Sequence[Mapping[str, Any]]
    """The failing rows, in groups; each maps an identifying column to the list of its values."""
    result: Mapping[str, Any]


def judge(made: Any, suite: Suite) -> list[JudgedCheck]:
    """Run `suite`, in which each check is one expectation, in the context `made`."""
    naming = [name for name in _NAMING_A_ROW if name in suite.frame]
    return [_outcome(suite.name, result) for result in validate(made, suite, naming)]


def validate(made: Any, suite: Suite, naming: Sequence[str]) -> list[ExpectationResult]:
    """Run `suite` in the context `made`; return its findings in the order of its checks.

    Args:
        naming: the columns of the frame that identify a row.

    Raises:
        CheckFailed: a built-in expectation could not be evaluated.
        UserError: an expectation of a user's suite could not be evaluated.
    """
    gx = great_expectations()
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        expectations = [_expectation(gx, check, place) for place, check in enumerate(suite.checks)]
    asset = made.data_sources.add_pandas(suite.name).add_dataframe_asset(suite.name)
    batch = asset.add_batch_definition_whole_dataframe(suite.name)
    stored = made.suites.add(gx.ExpectationSuite(suite.name, expectations=expectations))
    definition = made.validation_definitions.add(gx.ValidationDefinition(name=suite.name, data=batch, suite=stored))
    details = {
        "result_format": "COMPLETE", "exclude_unexpected_values": True, "unexpected_index_column_names": list(naming),
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from pandas, about comparisons in Great Expectations
        warnings.simplefilter("ignore", UserWarning)  # about groups in a user's regular expression
        try:
            outcome = definition.run(batch_parameters={"dataframe": suite.frame}, result_format=details)
        except Exception as error:  # of which Great Expectations makes no result
            users = [check.name for check in suite.checks if check.of_user]
            if not users:
                raise
            raise UserError(
                f"Great Expectations could not judge your suite (data.suite): {type(error).__name__}: {error}. One of "
                f"these expectations is the reason; check their kwargs, or leave it out: {listed(users)}."
            ) from error
    made.data_sources.delete(suite.name)  # which keeps the frame
    by_place = {result.expectation_config.meta["place"]: result for result in outcome.results}
    return [_result_of(check, by_place[place]) for place, check in enumerate(suite.checks)]


def _expectation(gx: Any, check: Check, place: int) -> Any:
    if check.kind == _QUANTILES:
        _mend_quantiles(gx.expectations)
    return getattr(gx.expectations, check.kind)(
        **check.options,
        description=check.description,
        severity=SEVERITY[check.severity],
        meta={"check": check.name, "place": place},
    )


_QUANTILES = "ExpectColumnQuantileValuesToBeBetween"


@cache
def _mend_quantiles(expectations: Any) -> None:
    """Make the success of the expectation on quantiles a boolean. In Great Expectations 1.9 it is NumPy's, which the
    package's own store cannot write as JSON."""
    kind = getattr(expectations, _QUANTILES)
    original = kind._validate

    def _validate(self: Any, *arguments: Any, **named: Any) -> Any:
        result = original(self, *arguments, **named)
        return {**result, "success": bool(result["success"])}

    kind._validate = _validate


def _result_of(check: Check, result: Any) -> ExpectationResult:
    info = result.exception_info or {}
    for raised in [info] if "raised_exception" in info else info.values():  # one error, or one for each failed metric
        if raised["raised_exception"]:
            message = str(raised["exception_message"]).strip().splitlines() or ["no reason given"]
            error = UserError if check.of_user else CheckFailed
            hint = ". Correct the expectation in your suite (data.suite)." if check.of_user else ""
            raise error(f"Great Expectations could not judge {check.name}: {message[0].rstrip('.')}{hint}")
    details = result.result
    return ExpectationResult(check, bool(result.success), details.get("unexpected_index_list") or (), details)


_TEXT = "(text)"


def hide_texts(made: Any, name: str) -> None:
    """Replace the texts in the stored results of the suite `name` of the context `made`, which Data Docs show.

    Expectations on a whole column observe its values: the distinct ones, the most common, a distribution. A count of
    unexpected values without a percentage is left out, because the pages of Great Expectations 1.9 cannot show it.
    """
    store = made.validation_results_store
    for key in store.list_keys():
        if key.expectation_suite_identifier.name != name:
            continue
        stored = store.get(key)
        for entry in stored.results:
            entry.result = _hidden(entry.result)
            if "unexpected_percent" not in entry.result:
                entry.result.pop("unexpected_count", None)
                entry.result.pop("partial_unexpected_list", None)
        store.set(key, stored)


def _hidden(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _hidden(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return list(map(_hidden, value))
    return _TEXT if isinstance(value, str) else value


def first_rows(check: JudgedCheck) -> str:
    """Return the first failing row numbers of a check as text."""
    by_file = check.get("rows_by_file", {})
    if not by_file:
        return _first(check["row_numbers"])
    return "; ".join(f"{file}: {_first(numbers)}" for file, numbers in by_file.items())


def _first(numbers: Sequence[int]) -> str:
    more = f" … {len(numbers) - FIRST_ROWS} more" if len(numbers) > FIRST_ROWS else ""
    return ", ".join(map(str, numbers[:FIRST_ROWS])) + more


def _outcome(suite: str, finding: ExpectationResult) -> JudgedCheck:
    check, details = finding.check, finding.result
    bad: dict[str, set[int]] = {}  # with a single file its name is ""
    for group in finding.named:
        for number, file in zip(group["row_id"], group.get("file") or repeat(""), strict=False):
            bad.setdefault(file, set()).add(int(number))
    by_file = {file: sorted(numbers) for file, numbers in sorted(bad.items())}
    count = int(details.get("unexpected_count", 0))
    of = int(details.get("element_count", 0) or 0) - int(details.get("missing_count", 0) or 0)
    value = details.get("observed_value")
    if "unexpected_count" in details:
        value = count / of if of else 0.0
    return judged_check(suite, check, value, by_file, finding.success)


def judged_check(
    suite: str, check: Check, value: Any, numbers: Mapping[str, Sequence[int]], passed: bool
) -> JudgedCheck:
    """Return a check's result for reports. `numbers` maps each file to its failing rows; a single file is named ""."""
    by_file = {file: list(of) for file, of in numbers.items()}
    outcome: JudgedCheck = {
        "name": check.name, "suite": suite, "description": check.description, "severity": check.severity,
        "threshold": list(check.threshold) if isinstance(check.threshold, tuple) else check.threshold,
        "value": round(float(value), 6) if isinstance(value, Real) else None,
        "rows": sum(map(len, by_file.values())), "row_numbers": by_file.pop("", []), "passed": passed,
    }  # fmt: skip
    if by_file:
        outcome["rows_by_file"] = by_file
    return outcome
