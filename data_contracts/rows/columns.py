"""The columns that the contract judges: each row's measures, as numbers and categories, never as text.

A column belongs to the phase that measures it. `read` measures every row by itself. `compared` measures rows that the
first phase kept against all other rows. `texts` measures rows that are still kept with the run's tokenizer.
If a row was not measured, its value is missing, and expectations ignore it.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.data.splits import SPLITS
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import COLUMNS, READINGS, places

LINE = "line"
"""The column with a row's position in its ledger."""
_ALL = slice(None)


def column_of(ledger: Ledger, name: str, rows: slice = _ALL) -> Any:
    """Return the values (n,) of a column: a measured one, or one of the source's own (`further`).

    Args:
        rows: the consecutive rows to return.
    """
    if name not in COLUMNS:
        if name not in ledger.extra_kinds:
            ledger.extra_kinds[name] = kind_of(ledger.further(name))
        return further(ledger.further(name, rows), ledger.extra_kinds[name])
    if name in _NAMES:
        codes = np.where((values := ledger.facts[rows])["made"] | (name == "reading"), values[name], -1)
        return pd.Categorical.from_codes(codes.astype(np.int64), pd.Index(list(_NAMES[name] or ledger.roles)))
    if COLUMNS[name].phase == "read":
        return ledger.facts[rows][name]
    named = name == "language"
    measured = ledger.measured.get(name, np.full(len(ledger.facts), None if named else np.nan))[rows]
    return measured if named else measured.astype(np.float32)


_NAMES: dict[str, Sequence[str]] = {"reading": READINGS, "split": SPLITS, "roles": ()}
"""Maps a column of names to what its codes mean; the roles are those of the ledger. A missing name has the code -1."""


def kind_of(values: list[Any]) -> list[bool]:
    """Return whether any value of a column is known, whether all known ones are booleans, and whether all can be read
    as numbers."""
    present = [value for value in values if value is not None]
    try:
        pd.to_numeric(pd.Series(values, dtype=object), errors="raise").astype(float)
        numbers = True
    except (TypeError, ValueError, OverflowError):
        numbers = False
    return [bool(present), all(isinstance(value, bool) for value in present), numbers]


def further(values: list[Any], kind: list[bool]) -> Any:
    """Return one of the source's own columns: numbers if every value is one (a CSV's values are texts), else
    categories.

    Args:
        kind: as `kind_of`, over all rows of the column.
    """
    any_present, booleans, numbers = kind
    if any_present and booleans:
        return pd.Series(values, dtype="boolean").astype(object)
    if numbers:
        return pd.to_numeric(pd.Series(values, dtype=object), errors="raise").astype(float)
    # pandas keeps text as UTF-8, which has no lone surrogates.
    texts = (None if value is None else str(value).encode("utf-8", "backslashreplace").decode() for value in values)
    return pd.Categorical(list(texts))


def row_frame(ledger: Ledger, columns: Iterable[str], rows: slice = _ALL) -> pd.DataFrame:
    """Return a frame of all rows of the ledger, or some consecutive ones, with the column `line` and the `columns`."""
    lines = np.arange(len(ledger.facts))[rows]
    return pd.DataFrame({LINE: lines, **{name: column_of(ledger, name, rows) for name in columns}})


def selected_frame(ledger: Ledger, selected: NDArray[np.bool_], columns: Iterable[str]) -> pd.DataFrame:
    """Return the same frame for the selected rows. Values in other rows do not affect whether a column is numeric."""
    frame = row_frame(ledger, ())[selected].reset_index(drop=True)
    for name in columns:
        if name in COLUMNS:
            frame[name] = pd.Series(column_of(ledger, name))[selected].reset_index(drop=True)
        else:
            values = ledger.further(name)
            chosen = [values[index] for index in np.flatnonzero(selected)]
            frame[name] = further(chosen, kind_of(chosen))
    return frame


def numbers_of(ledger: Ledger, lines: NDArray[np.int64]) -> dict[str, list[int]]:
    """Return for each file the numbers of the rows from which the ledger's `lines` were made."""
    which = np.zeros(len(ledger.facts), bool)
    which[lines] = True
    file, numbers = places(ledger.rows(which))
    return {ledger.files[index]: numbers[file == index].tolist() for index in np.unique(file)}
