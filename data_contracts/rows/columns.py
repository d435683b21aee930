"""The columns that the contract judges: each row's measures, as numbers and categories, never as text.

A column belongs to the phase that measures it. `read` measures every row by itself. `compared` measures rows that the
first phase kept against all other rows. `texts` measures rows that are still kept with the run's tokenizer.
If a row was not measured, its value is missing, and expectations ignore it.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from components.data.splits import SPLITS
from data_contracts.rows.ledger import Ledger
from data_contracts.rows.measuring import READINGS, kind_of, places

LINE = "line"
"""The column with a row's position in its ledger."""
PHASES = ("read", "compared", "texts")
"""The phases, in order."""
PAIRS, DEMONSTRATIONS, PROMPTS = "preferences", "demonstrations", "prompts"
_EVERY = (PAIRS, DEMONSTRATIONS, PROMPTS)


class Column(NamedTuple):
    """A measured column."""

    phase: str
    meaning: str
    kinds: tuple[str, ...] = _EVERY
    """The kinds of data that have it."""
    tokens: bool = False
    """Whether it needs a run's tokenizer."""
    make: "Callable[[_Some], Any] | None" = None
    """Computes the column from the facts; None if it comes from comparing rows or from texts (`Ledger.measured`,
    `Ledger.text_measure`)."""
    category: bool = False


def _fact(name: str) -> "Callable[[_Some], Any]":
    """Return a column with a count that every readable row has."""
    return lambda ledger: _where(ledger.facts[name], ledger.facts["made"])


def _where(values: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[np.float32]:
    return np.where(present, values, np.nan).astype(np.float32)


def _words(side: int) -> "Callable[[_Some], Any]":
    return lambda ledger: _where(ledger.facts["words"][:, side], ledger.facts["words"][:, side] >= 0)


def _named(codes: NDArray[Any], names: Iterable[str]) -> Any:
    """Return a categorical column of `names` from codes (n,); -1 means missing."""
    return pd.Categorical.from_codes(codes.astype(np.int64), pd.Index(list(names)))


COLUMNS: dict[str, Column] = {
    "reading": Column("read", f"how far the row was read: {', '.join(READINGS)}", category=True,
                      make=lambda ledger: _named(ledger.facts["reading"], READINGS)),
    "roles": Column("read", "roles of the prompt's turns, a letter each (sua: system, user, assistant)", category=True,
                    make=lambda ledger: _named(ledger.facts["roles"], ledger.roles)),
    "turns": Column("read", "turns of the prompt, a system message among them", make=_fact("turns")),
    "characters": Column("read", "characters of the prompt and of the longer response", make=_fact("characters")),
    "empty_texts": Column("read", "turns and responses in which a reader sees nothing", make=_fact("empty")),
    "unclean_texts": Column("read", "texts with a control or replacement character", make=_fact("unclean")),
    "marked_texts": Column("read", "turns and responses with a marker of a chat template", make=_fact("marked")),
    "placeholder_responses": Column("read", "responses that are a missing value or an error written as text",
                                    (PAIRS, DEMONSTRATIONS), make=_fact("placeholders")),
    "distinct_responses": Column("read", "distinct responses, 1 or 2", (PAIRS,),
                                 make=lambda ledger: _where(2 - ledger.facts["same"], ledger.facts["made"])),
    "chosen_words": Column("read", "words of the chosen response (characters of scripts without spaces)", (PAIRS,),
                           make=_words(0)),
    "rejected_words": Column("read", "words of the rejected response", (PAIRS,), make=_words(1)),
    "votes": Column("read", "votes on the pair", (PAIRS,),
                    make=lambda ledger: _where(ledger.facts["ballot"].sum(1), ledger.facts["voted"])),
    "votes_for_neither": Column("read", "votes that say neither response is better", (PAIRS,),
                                make=lambda ledger: _where(ledger.facts["ballot"][:, 2], ledger.facts["voted"])),
    "lead": Column("read", "lead of the most frequent answer over the next, a share of the votes; 0 is a tie",
                   (PAIRS,), make=lambda ledger: ledger.facts["lead"]),
    "deciding_votes": Column("read", "votes that decide the pair; missing where experts or data.labels decide",
                             (PAIRS,),
                             make=lambda ledger: _where(ledger.facts["deciding"], ledger.facts["deciding"] >= 0)),
    "given_out": Column("read", "1 where Tether gave the pair out to label", (PAIRS,), make=_fact("given_out")),
    "repeated_votes": Column("read", "1 where an annotator voted twice on the pair", (PAIRS,), make=_fact("repeated")),
    "margin": Column("read", "how much better the chosen response is, in the source's units", (PAIRS,),
                     make=lambda ledger: ledger.facts["margin"]),
    "desirable": Column("read", "0 where a label says that the response is undesirable", (DEMONSTRATIONS,),
                        make=lambda ledger: _where(1 - ledger.facts["undesirable"], ledger.facts["made"])),
    "split": Column("read", f"{', '.join(SPLITS)}: by the prompt's own words", category=True,
                    make=lambda ledger: _named(np.where(ledger.facts["made"], ledger.facts["split"], -1), SPLITS)),
    "copies_before": Column("compared", "1 where an earlier row has the same prompt and responses"),
    "contradictions": Column("compared", "1 where another row prefers the same responses the other way", (PAIRS,)),
    "near_copies_before": Column("texts", "1 where an earlier row is nearly the same (data.near_duplicate)"),
    "contaminated": Column("texts", "1 where the prompt nearly repeats one of data.decontaminate"),
    "held_out_before": Column("texts", "1 where a row for training nearly repeats a held-out prompt of data.reference"),
    "language": Column("texts", "likeliest language of the responses (ISO 639-1)", category=True),
    "special_texts": Column("texts", "turns and responses with a special token of the tokenizer", tokens=True),
    "template": Column("texts", "0: the chat template renders the row unchanged, 1: it refuses it, 2: it changes it",
                       tokens=True),
    "distinct_cut_responses": Column("texts", "distinct responses once cut to generation.max_new_tokens", (PAIRS,),
                                     tokens=True),
    "prompt_tokens": Column("texts", "tokens of the prompt in the chat template", tokens=True),
    "response_tokens": Column("texts", "tokens of the longer response, EOS included", (PAIRS, DEMONSTRATIONS),
                              tokens=True),
    "chosen_tokens": Column("texts", "tokens of the chosen response", (PAIRS,), tokens=True),
    "rejected_tokens": Column("texts", "tokens of the rejected response", (PAIRS,), tokens=True),
}  # fmt: skip
"""Every measured column, by name."""


class _Some(NamedTuple):
    """Some rows of a ledger, from which columns are computed."""

    facts: Any
    roles: dict[str, int]


_ALL = slice(None)


def column_of(ledger: Ledger, name: str, rows: slice = _ALL) -> Any:
    """Return the values (n,) of a column: a measured one, or one of the source's own (`further`).

    Args:
        rows: the consecutive rows to return.
    """
    if name not in COLUMNS:
        return further(ledger.further(name, rows), ledger.extra_kinds[name])
    column = COLUMNS[name]
    if column.make is not None:
        return column.make(_Some(ledger.facts[rows], ledger.roles))
    values = ledger.measured.get(name)
    return ledger.text_measure(name, rows) if values is None else values[rows].astype(np.float32)


def further(values: list[Any], kind: list[bool]) -> Any:
    """Return one of the source's own columns: numbers if every value is one (a CSV's values are texts), else
    categories.

    Args:
        kind: as `ShardNotes.kinds`, over all rows of the column.
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
