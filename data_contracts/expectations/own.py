"""Suites in Great Expectations' JSON format: read a user's suite with precise errors, and write the suite of a run."""

import difflib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from components.base.errors import UserError
from components.base.paths import read_regular
from components.base.strict_json import BadJson, parse_json
from components.data.checks_config import UNUSABLE, RowChecks, Severity
from components.data.inputs import KINDS
from data_contracts.expectations.suites import SEVERITY, Check, great_expectations

_SEVERITIES: dict[str, Severity] = {"error": "error", "quarantine": "quarantine", "warning": "warn", "warn": "warn"}
_OF_GX = {theirs: ours for ours, theirs in SEVERITY.items()}
_OF_COLUMNS = (
    "expect_table_column_count_to_be_between", "expect_table_column_count_to_equal",
    "expect_table_columns_to_match_ordered_list", "expect_table_columns_to_match_set",
)  # fmt: skip
"""Expectations on the names and the number of a table's columns."""
REPLACES = "replaces_ours"
"""A key in a suite's `meta`: true removes all built-in checks, except those without which a row cannot be used."""


class UserSuite(NamedTuple):
    """The expectations of a user's suite."""

    path: Path
    rows: tuple[Check, ...] = ()
    """Expectations on single rows."""
    whole: tuple[Check, ...] = ()
    """Expectations on all kept rows together."""
    replaces: bool = False

    @property
    def columns(self) -> set[str]:
        """Return the columns that the expectations use."""
        return {column for check in [*self.rows, *self.whole] for column in check.columns}

    def over(self, ours: list[Check]) -> list[Check]:
        """Return `ours` without the built-in checks that this suite replaces: those it names, or all."""
        names = {check.name for check in self.rows}
        return [c for c in ours if c.name not in names and (not self.replaces or c.name in UNUSABLE or c.stays)]


def load_suite(path: Path) -> UserSuite:
    """Read a suite.

    Raises:
        UserError: it is not a valid suite. The message names the file and the expectation's position, type and field.
    """
    try:
        document = parse_json(read_regular(path).decode("utf-8-sig"))
    except OSError as error:
        raise UserError(f"data.suite: {path} can't be read: {error.strerror}. Give the path of a JSON file.") from error
    except (UnicodeDecodeError, BadJson) as error:
        where = f" at line {error.line}" if isinstance(error, BadJson) and error.line else ""
        raise UserError(f"data.suite: {path} is not JSON{where}: {error}. Correct it.") from error
    entries = document.get("expectations") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(
            f"data.suite: {path} has no `expectations`, a list with one expectation or more. `tether data check "
            "FILE --draft-suite NEW` drafts one from a good file."
        )
    meta = document.get("meta") or {}
    replaces = meta.get(REPLACES, False) if isinstance(meta, dict) else None
    if not isinstance(replaces, bool):
        raise UserError(f"data.suite: {path}: meta.{REPLACES} is {json.dumps(replaces)}, expected true or false.")
    rows: list[Check] = []
    whole: list[Check] = []
    names: set[str] = set()
    for place, entry in enumerate(entries):
        check, of_rows = _check(path, place, entry, names)
        names.add(check.name)
        (rows if of_rows else whole).append(check)
    return UserSuite(path, tuple(rows), tuple(whole), replaces)


def as_document(checks: Mapping[str, Iterable[Check]]) -> dict[str, Any]:
    """Return all expectations on a run's data, built-in and the user's, as a suite in Great Expectations' format.

    Args:
        checks: checks by what they judge: a kind of data, the kept pairs, or dataset-level measures.
    """
    entries = [
        {
            "type": getattr(great_expectations().expectations, check.kind).expectation_type,
            "kwargs": dict(check.options),
            "severity": SEVERITY[check.severity],
            "meta": {
                "check": check.name,
                "severity": "warning" if check.severity == "warn" else check.severity,
                "sentence": check.description,
                "source": source,
                "of_user": check.of_user,
            },
        }
        for source, of_source in checks.items()
        for check in of_source
    ]
    return {"name": "tether", "expectations": entries, "meta": {}}


def _check(path: Path, place: int, entry: Any, names: set[str]) -> tuple[Check, bool]:
    kind = entry.get("type") if isinstance(entry, dict) else None
    where = f"data.suite: {path}: expectations[{place}]" + (f" ({kind})" if isinstance(kind, str) else "")

    def refuse(text: str) -> NoReturn:
        raise UserError(f"{where}: {text}")

    if not isinstance(kind, str):
        refuse("it has no `type`, such as expect_column_values_to_be_between.")
    if unknown := sorted(entry.keys() - {"type", "kwargs", "meta", "severity", "id", "notes", "description"}):
        refuse(f"the field `{unknown[0]}` is unknown. The fields are type, kwargs, meta and severity.")
    options, meta = entry.get("kwargs") or {}, entry.get("meta") or {}
    if not isinstance(options, dict) or not isinstance(meta, dict):
        refuse("`kwargs` and `meta` must be objects.")
    made, of_rows = _made(kind, options, refuse)
    severity = _severity(entry, meta, of_rows, refuse)
    if (source := meta.get("source", "")) and source not in KINDS:
        refuse(f"meta.source is {source!r}, expected one of {', '.join(KINDS)}.")
    name = str(meta.get("check") or _name_of(kind, options))
    if name in names:
        refuse(f"another expectation has the name {name!r}. Give each its own in meta.check.")
    if name in UNUSABLE or (name in RowChecks.model_fields and not of_rows):
        refuse(f"meta.check is {name!r}, a check of rows that this expectation can't replace. Give it another name.")
    sentence = str(meta.get("sentence") or entry.get("description") or f"{kind} {json.dumps(options, sort_keys=True)}")
    return Check(
        name, sentence, severity, _threshold(options, of_rows), made, options, of_user=True, source=source
    ), of_rows


def _made(kind: str, options: Mapping[str, Any], refuse: Any) -> tuple[str, bool]:
    """Build an expectation to check that its class accepts the options; return the class, and whether it judges single
    rows."""
    gx = great_expectations()
    from great_expectations.compatibility import pydantic
    from great_expectations.expectations import expectation as base

    named = (name for name in dir(gx.expectations) if name.startswith("Expect"))
    classes = {getattr(gx.expectations, name).expectation_type: name for name in named}
    if kind not in classes:
        near = difflib.get_close_matches(kind, classes, 1)
        refuse(f"Great Expectations has no such expectation{f'; do you mean {near[0]}?' if near else '.'}")
    if kind in _OF_COLUMNS:
        refuse(
            "it judges which columns a table has, and the table that is judged has only those that your suite names. "
            "Leave it out: a column that an expectation names and the data lack ends the run."
        )
    if name := next(
        (name for name, value in options.items() if isinstance(value, dict) and "$PARAMETER" in value), None
    ):
        refuse(f"kwargs.{name} is a suite parameter, and a run has no values for these. Write the value itself.")
    if isinstance(condition := options.get("row_condition"), str):
        refuse(
            f"kwargs.row_condition is the text {condition!r}, which Great Expectations has deprecated. Write it as an "
            'object, such as {"type": "comparison", "column": {"name": "turns"}, "operator": ">", "parameter": 1}.'
        )
    made = getattr(gx.expectations, classes[kind])
    try:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            made(**options)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"] if part != "__root__")
        refuse(f"kwargs{f'.{field}' if field else ''}: {first['msg']}.")
    except (TypeError, ValueError) as error:
        refuse(f"kwargs: {str(error).splitlines()[0]}.")
    maps = (base.ColumnMapExpectation, base.ColumnPairMapExpectation, base.MulticolumnMapExpectation)
    return classes[kind], issubclass(made, maps)


def _severity(entry: Mapping[str, Any], meta: Mapping[str, Any], of_rows: bool, refuse: Any) -> Severity:
    ours = "severity" in meta
    names, severity = (_SEVERITIES, meta["severity"]) if ours else (_OF_GX, entry.get("severity", "critical"))
    if not isinstance(severity, str) or severity not in names:
        refuse(f"{'meta.' if ours else ''}severity is {severity!r}, expected one of {', '.join(names)}.")
    if names[severity] != "quarantine" or of_rows:
        return names[severity]
    if ours:
        refuse("meta.severity is quarantine, but this expectation judges all rows together. Write error or warning.")
    return "warn"


def _threshold(options: Mapping[str, Any], of_rows: bool) -> float | tuple[float, float]:
    """Return the share of rows that may fail, or the bounds of a value."""
    if of_rows:
        return round(1 - float(options.get("mostly", 1)), 12)
    ends = [options.get(name) for name in ("min_value", "max_value")]
    bounds = [float(end) for end in ends if isinstance(end, int | float)]
    return (bounds[0], bounds[1]) if len(bounds) == 2 else bounds[0] if bounds else 0.0


def _name_of(kind: str, options: Mapping[str, Any]) -> str:
    column = next((options[name] for name in ("column", "column_A") if name in options), "")
    return f"{kind.removeprefix('expect_')}{f': {column}' if column else ''}"
