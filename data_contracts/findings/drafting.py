"""Draft a suite from a good file: expect the ranges and categories found there. The user edits the draft."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from components.base.errors import UserError
from components.base.text import counted
from components.data.config import DataConfig, SplitConfig
from components.data.rows import shown
from data_contracts.expectations import suites
from data_contracts.expectations.row_expectations import row_checks
from data_contracts.findings.row_judging import RowJudge
from data_contracts.rows.columns import column_of
from data_contracts.rows.gather import RowSource, judged_rows, not_one_valid
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import COLUMNS
from data_contracts.rows.reading_report import reading_of

MOST_VALUES = 20
"""A column with at most this many distinct values gets an expectation with the list of allowed values."""
_MEASURED = ("turns", "roles", "characters", "chosen_words", "rejected_words", "votes", "lead", "margin")
"""The measured columns that vary between files. The others count faults, which the built-in checks judge."""
_MEANT = ("desirable", "decided")
"""Checks that a good file's rows may fail: KTO data have undesirable responses, and votes have ties. The draft judges
these rows too, so their values are allowed."""
_NESTED = {"list", "dict"}
"""What a column shows in place of a list or an object."""
_EXACT = 2**53
"""Whole numbers below this are exact as floats."""


def draft(path: Path, data: DataConfig, scratch: Path) -> dict[str, Any]:
    """Draft a suite in Great Expectations' format from the rows of a file that pass the built-in checks.

    Args:
        scratch: a folder for data that is too large for memory.

    Raises:
        UserError: the file can't be read, is a rating sheet, or has no valid row.
    """
    reading = reading_of(path, data)
    source = RowSource.named(reading.kind, path, data)._replace(extra=tuple(reading.ignored))
    ledger = Ledger(scratch / "draft", SplitConfig(), seed=0)
    ledger.extra = source.extra
    ledger.fill(judged_rows(source, data.max_characters), lambda seen: None)
    judge = RowJudge(suites.context(), reading.kind, ledger, row_checks(data, None, reading.kind), [])
    judge.judge("read")
    good = ledger.good(despite=_MEANT)
    if not ledger.good().any():
        raise not_one_valid(source, ledger.count(), ledger.reasons(), ledger.named)
    names = [name for name in _MEASURED if reading.kind in COLUMNS[name].kinds]
    entries = [
        entry
        for name in [*names, *(name for name in reading.ignored if name not in COLUMNS)]
        for entry in _expected(name, pd.Series(column_of(ledger, name))[good], path.name, reading.kind)
    ]
    if not entries:
        raise UserError(
            f"{path} has no column with a range or few values. Write a suite by hand (docs/guide/expectations.md)."
        )
    return {"name": "my_suite", "expectations": entries, "meta": {"replaces_ours": False}}


def _expected(name: str, values: "pd.Series[Any]", file: str, kind: str) -> Iterator[dict[str, Any]]:
    present = values.dropna()
    if not len(present):
        return
    if pd.api.types.is_numeric_dtype(present):
        present = present[np.isfinite(present.astype(float))]  # JSON has no infinity
        if not len(present):
            return
        low, high = _rounded(present.min(), math.floor), _rounded(present.max(), math.ceil)
        options: dict[str, Any] = {"column": name, "min_value": low, "max_value": high}
        sentence = f"{name} is {low} in {file}" if low == high else f"{name} is {low} to {high} in {file}"
        yield _entry("expect_column_values_to_be_between", options, sentence, kind)
        return
    distinct = sorted(present.unique().tolist(), key=str)
    if len(distinct) <= MOST_VALUES and not _NESTED.issuperset(distinct):
        sentence = f"{name} is one of {counted(len(distinct), 'value')} in {file}"
        if len(distinct) == 1:
            sentence = f"{name} is {shown(distinct[0])} in {file}"
        yield _entry("expect_column_values_to_be_in_set", {"column": name, "value_set": distinct}, sentence, kind)


def _entry(kind: str, options: dict[str, Any], sentence: str, source: str) -> dict[str, Any]:
    meta = {"severity": "quarantine", "sentence": sentence, "source": source}
    return {"type": kind, "kwargs": options | {"mostly": 0.95}, "meta": meta}


def _rounded(value: Any, outwards: Callable[[float], int]) -> float | int:
    """Return a range bound, rounded `outwards` (down or up) to 6 digits so that the value stays inside the range."""
    number = float(value)
    if number == math.floor(number):
        return int(number) if abs(number) < _EXACT else number
    return outwards(number * 10**6) / 10**6
