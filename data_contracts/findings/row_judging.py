"""Judge rows with Great Expectations, phase by phase, and record failing rows in the ledger."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.base.errors import CheckFailed, UserError
from components.data.checks_config import RowChecks
from components.data.rows import shown
from data_contracts.expectations.suites import (
    Check,
    ExpectationResult,
    JudgedCheck,
    Suite,
    hide_texts,
    judged_check,
    validate,
)
from data_contracts.rows.columns import LINE, column_of, numbers_of, row_frame, selected_frame
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import COLUMNS, PHASES, VOTES_ONCE

_ORDER = {name: place for place, name in enumerate(RowChecks.model_fields)}
_AS_NUMBER, _AS_TEXT = "{} as a number, else {}", "{} as text"
_OF_TEXTS = re.compile(r"ExpectColumnValue(Lengths|sTo(Not)?Match|sToBe(Dateutil|Json)Parseable)")
"""Classes of expectations on texts."""
JUDGED_ROWS = 200_000
"""Number of rows that Great Expectations judges at once; this limits its memory."""
BY_ROW = frozenset(
    {
        "ExpectColumnPairValuesAToBeGreaterThanB", "ExpectColumnPairValuesToBeEqual", "ExpectColumnPairValuesToBeInSet",
        "ExpectColumnValueLengthsToBeBetween", "ExpectColumnValueLengthsToEqual", "ExpectColumnValuesToBeBetween",
        "ExpectColumnValuesToBeInSet", "ExpectColumnValuesToBeNull", "ExpectColumnValuesToMatchLikePattern",
        "ExpectColumnValuesToMatchLikePatternList", "ExpectColumnValuesToMatchRegex",
        "ExpectColumnValuesToMatchRegexList", "ExpectColumnValuesToNotBeInSet", "ExpectColumnValuesToNotBeNull",
        "ExpectColumnValuesToNotMatchLikePattern", "ExpectColumnValuesToNotMatchLikePatternList",
        "ExpectColumnValuesToNotMatchRegex", "ExpectColumnValuesToNotMatchRegexList",
        "ExpectMulticolumnSumToEqual", "ExpectSelectColumnValuesToBeUniqueWithinRecord",
    }
)  # fmt: skip
"""Expectations whose result for a row depends on that row alone, so that rows can be judged in batches. Others, such as
uniqueness or z-scores, need all rows at once and get only their own columns."""


class RowJudge:
    """Judges the rows of one kind of data."""

    def __init__(
        self, context: Any, kind: str, ledger: Ledger, checks: Sequence[Check], whole: Sequence[Check]
    ) -> None:
        """Take the checks of single rows (`checks`), and a user's expectations on all selected rows (`whole`)."""
        self.context, self.kind, self.ledger, self.checks, self.whole = context, kind, ledger, checks, whole
        self._succeeded: dict[str, bool] = {}
        self.unjudged: list[str] = []
        """Names of a user's expectations that judged no value: they need a tokenizer, or their column has no value."""

    def leave_out_tokens(self) -> None:
        """Remove the checks that need a tokenizer."""
        self.unjudged += [c.name for c in [*self.checks, *self.whole] if c.of_user and _needs_tokens(c)]
        self.checks, self.whole = ([c for c in group if not _needs_tokens(c)] for group in (self.checks, self.whole))

    def further(self) -> list[str]:
        """Return the columns that the source must have because Tether does not measure them."""
        named = (column for check in [*self.checks, *self.whole] for column in check.columns)
        return [column for column in dict.fromkeys(named) if column not in COLUMNS]

    def asks(self, column: str) -> bool:
        """Return whether an expectation uses a column."""
        return any(column in check.columns for check in [*self.checks, *self.whole])

    def judge(self, phase: str) -> None:
        """Judge the columns of `phase`; record failing rows in the ledger, and quarantine them if the check says so.

        Raises:
            CheckFailed: a row without a canonical form fails no expectation, so it would not be quarantined.
            UserError: an expectation of a user's suite can't be evaluated.
        """
        checks = [check for check in self.checks if phase_of(check) == phase]
        results: dict[int, list[ExpectationResult]] = {place: [] for place in range(len(checks))}
        every = slice(0, len(self.ledger.facts))
        parts = [slice(start, min(start + JUDGED_ROWS, every.stop)) for start in range(0, every.stop, JUDGED_ROWS)]
        alone = [place for place, check in enumerate(checks) if check.kind in BY_ROW]
        runs = [(f"_{number}" if number > 1 else "", rows, alone) for number, rows in enumerate(parts, 1)]
        if len(parts) <= 1:
            runs = [("", every, [*results])]
        elif together := [place for place in results if place not in alone]:
            runs.append(("_together", every, together))
        for name, rows, which in runs:
            if which:
                suite = Suite(f"{self.kind}_{phase}{name}", *self._frame([checks[place] for place in which], rows))
                for place, result in zip(which, validate(self.context, suite, [LINE]), strict=True):
                    results[place].append(result)
        for place, check in enumerate(checks):
            self._take(check, results[place])
        if phase == PHASES[0]:
            unusable = np.flatnonzero(~self.ledger.facts["made"] & ~self.ledger.out)
            if len(unusable):
                named = self.ledger.named(self.ledger.facts["row"][unusable[0]])
                raise CheckFailed(f"{named} has no usable form, but no expectation names it")

    def _frame(self, checks: Sequence[Check], rows: slice) -> tuple[pd.DataFrame, list[Check]]:
        """Return the frame of `rows` for `checks`, and the checks with the names of its columns.

        If a check compares one of the source's own columns with numbers, a value that is not a number becomes infinite,
        so that it is out of range, and in no set. If a check on texts, such as a regular expression, names a column of
        numbers, it judges them as text (5, not 5.0, which pandas would make of it).
        """
        columns = dict.fromkeys(column for check in checks for column in check.columns)
        frame, renamed = row_frame(self.ledger, columns, rows), []
        for check in checks:
            column = str(check.options.get("column"))
            if _wants_numbers(check) and column not in COLUMNS and not pd.api.types.is_numeric_dtype(frame[column]):
                text = frame[column].astype(object)
                number = pd.to_numeric(text, errors="coerce").astype(float)
                below = check.options.get("min_value") is not None and check.options.get("max_value") is None
                outside = -np.inf if below else np.inf
                name = _AS_NUMBER.format(column, outside)
                frame[name] = number.mask(number.isna() & text.notna(), outside)
                check = replace(check, options={**check.options, "column": name})
            elif _OF_TEXTS.match(check.kind) and column in frame and pd.api.types.is_numeric_dtype(frame[column]):
                raw = frame[column].tolist() if column in COLUMNS else self.ledger.further(column, rows)
                name = _AS_TEXT.format(column)
                frame[name] = pd.Series([_written(value) for value in raw], dtype=object)
                check = replace(check, options={**check.options, "column": name})
            renamed.append(check)
        return frame, renamed

    def _take(self, check: Check, results: Sequence[ExpectationResult]) -> None:
        named = (int(line) for part in results for group in part.named for line in group[LINE])
        lines = np.fromiter(named, np.int64)
        self._succeeded[check.name] = succeeded(check, results) and self._succeeded.get(check.name, True)
        if check.of_user and results and not sum(map(_known, results)):
            self.unjudged.append(check.name)
        stay = np.bool_(check.severity == "warn") | (check.stays & self.ledger.facts["made"][lines])
        for some, keeps_out in ((lines[stay], False), (lines[~stay], True)):
            self.ledger.name(check.name, some, keeps_out, lambda index: self._reason(check, index))

    def _reason(self, check: Check, index: int) -> str:
        """Return the reason for a failing row without a note: the values that the expectation judged, and its
        description."""
        row = slice(index, index + 1)
        values = (f"{column} is {_shown(column_of(self.ledger, column, row))}" for column in check.columns)
        return f"{check.name}: {', '.join(values)}. {check.description}"

    def outcomes(self) -> list[JudgedCheck]:
        """Return the result of each row check, over all its expectations.

        A built-in check passes if the share of failing rows is at most its threshold. Rows of the files are counted: a
        ranking that makes several pairs is one row, and of repeated votes the share of all votes counts. A user's check
        passes if Great Expectations says so.
        """
        by_name = {check.name: check for check in self.checks if check.name in self._succeeded}
        total, out = self.ledger.count(), []
        for name in sorted(by_name, key=lambda name: (_ORDER.get(name, len(_ORDER)), name)):
            check = by_name[name]
            numbers = numbers_of(self.ledger, np.flatnonzero(~self.ledger.passes(name)))
            failing = sum(map(len, numbers.values()))
            # Repeated votes: the same share whether the file has a row for each pair or for each vote.
            votes = failing + int(self.ledger.facts["ballot"].sum()) if name == VOTES_ONCE and failing else 0
            share = failing / max(1, total, votes)
            allowed = check.threshold if isinstance(check.threshold, float | int) else 1.0
            passed = self._succeeded[name] if check.of_user else share <= allowed + 1e-12
            by_file = numbers if len(self.ledger.files) > 1 else dict(zip([""], numbers.values(), strict=False))
            out.append(judged_check(f"{self.kind}_rows", check, share, by_file, passed))
        return out

    def judge_whole(self, selected: NDArray[np.bool_]) -> list[JudgedCheck]:
        """Return the results of the user's dataset-level expectations on the selected rows."""
        if not self.whole:
            return []
        columns = dict.fromkeys(column for check in self.whole for column in check.columns)
        frame = selected_frame(self.ledger, selected, columns)
        results = validate(self.context, Suite(f"{self.kind}_kept", frame, self.whole), [LINE])
        hide_texts(self.context, f"{self.kind}_kept")
        return [
            judged_check(f"{self.kind}_kept", part.check, part.result.get("observed_value"), {}, part.success)
            for part in results
        ]


def _needs_tokens(check: Check) -> bool:
    return any(name in COLUMNS and COLUMNS[name].tokens for name in check.columns)


def _known(part: ExpectationResult) -> int:
    return int((part.result.get("element_count") or 0) - (part.result.get("missing_count") or 0))


def succeeded(check: Check, parts: Sequence[ExpectationResult]) -> bool:
    """Return whether an expectation that judged rows in batches holds for all of them: s / n >= `mostly`, where s of n
    present values are as expected. Great Expectations uses the same rule for a single frame."""
    if len(parts) == 1:
        return parts[0].success
    present = sum(map(_known, parts))
    unexpected = sum(part.result["unexpected_count"] for part in parts)
    return not present or (present - unexpected) / present >= float(str(check.options.get("mostly", 1)))


def phase_of(check: Check) -> str:
    """Return the earliest phase in which all columns of a check are measured."""
    return max(
        (COLUMNS[column].phase for column in check.columns if column in COLUMNS), key=PHASES.index, default=PHASES[0]
    )


def refuse_unknown(judge: RowJudge, path: object, columns: Iterable[str]) -> None:
    """Refuse a user's expectation on a column that neither the source nor Tether has.

    Args:
        path: of the suite, for the message.
        columns: of the source.

    Raises:
        UserError: there is such an expectation; the message names file, expectation and column.
    """
    have = list(columns)
    for check in [*judge.checks, *judge.whole]:
        for column in check.columns:
            ours = COLUMNS.get(column)
            if check.of_user and (judge.kind not in ours.kinds if ours else column not in have):
                measured = [name for name, measure in COLUMNS.items() if judge.kind in measure.kinds]
                raise UserError(
                    f"data.suite: {path}: the expectation {check.name!r} names the column {column!r}, which the "
                    f"{judge.kind} do not have. Their columns are {', '.join(have) or 'none'}; Tether measures "
                    f"{', '.join(measured)}. Name one of these."
                )


def _wants_numbers(check: Check) -> bool:
    """Return whether a check compares values with numbers: with a bound, or with a set of which all are numbers."""
    if check.kind == "ExpectColumnValuesToBeBetween":
        return any(_is_number(check.options.get(end)) for end in ("min_value", "max_value"))
    values = check.options.get("value_set") if check.kind in _SETS else None
    return isinstance(values, list | tuple) and bool(values) and all(map(_is_number, values))


_SETS = ("ExpectColumnValuesToBeInSet", "ExpectColumnValuesToNotBeInSet")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _written(value: Any) -> str | None:
    """Return a value of a column of numbers as text, whole numbers without `.0`; None if it is missing."""
    if value is None or value != value:
        return None
    return str(int(value)) if isinstance(value, np.floating | float) and float(value).is_integer() else str(value)


def _shown(values: Any) -> str:
    value = pd.Series(values).iloc[0]
    if isinstance(value, float | np.floating):
        return f"{value:g}"
    return shown(value.item() if isinstance(value, np.generic) else value)
