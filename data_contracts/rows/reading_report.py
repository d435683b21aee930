"""Report how a file will be read, which of its columns are ignored, and how to map them, before its rows are judged.

A file can be valid as another kind of data: a file of votes with unknown column names and a `prompt` column is also a
valid file of prompts. So ignored columns are reported, and a file that looks like preferences is not accepted as
another kind.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.text import counted
from components.data.config import DataConfig
from components.data.formats import demonstrations, pairs
from components.data.formats.labels import KTO
from components.data.formats.public import shape_of
from components.data.formats.public_fields import TEXTS, ReadingOptions, Shape
from components.data.formats.public_votes import argilla_votes
from components.data.formats.unread import used_by
from components.data.readers import read_source
from components.data.rows import BadRow, RawRow
from components.human_eval.batch.returned_sheets import looks_like_sheet
from data_contracts.rows.gather import DETECT_ON, RowSource, options_of, renamed
from data_contracts.rows.schemas import SourceReading

_RESPONSES = set("response responses answer completion output reply generation candidate summary resp y".split())
_WORSE = set("rejected worse worst bad loser lose dispreferred negative neg reject incorrect wrong".split())
_SIDES = _WORSE | set("a b w l j k 0 1 2 first second left right one two chosen better best good winner win preferred "
                      "accepted positive pos accept correct".split())  # fmt: skip
"""Words that name one of two responses. Those of `_WORSE` count even if the other column has none: `answer`,
`bad_answer`."""
_PREFERENCES = (
    "Preferences have `prompt`, `chosen` and `rejected`, or `prompt`, `a`, `b`, `label` and `annotator`, or `prompt`, "
    "`responses` and `scores` or `ranks`."
)
_DEMONSTRATIONS = (
    "Demonstrations have `prompt` and `response`. SFT imitates all of them. To keep bad "
    "ones out, map their labels to `label` and explain them in data.label_values, or give rows with scores as "
    "preferences (data.score.name)."
)

Row = Mapping[str, Any]
"""The fields of a readable row."""


class FileReading(NamedTuple):
    """What the first rows of a file show about it."""

    kind: str
    format: str
    ignored: list[str]
    mistaken: bool = False
    """Whether it looks like preferences but is read as another kind."""
    note: str = ""
    """What to know about the rows; empty if nothing."""

    def as_json(self, path: Path) -> SourceReading:
        """Return it as JSON, with advice."""
        return {
            "source": self.kind, "file": str(path), "format": self.format, "ignored": self.ignored,
            "hint": " ".join(filter(None, (self.note, self._about_columns()))) or None,
        }  # fmt: skip

    def _about_columns(self) -> str:
        if not self.ignored:
            return "It has columns of preferences, but not all that a pair needs." if self.mistaken else ""
        advice = "If an unused column is one of Tether's fields under another name, map it: "
        if self.kind == "preferences":
            return f"{advice}--set data.columns.FIELD=COLUMN. docs/guide/formats.md lists the fields."
        if self.kind == "demonstrations" and not self.mistaken:
            return f"{advice}--set data.demonstration_columns.FIELD=COLUMN. {_DEMONSTRATIONS}"
        return (
            f"{advice}--set data.columns.FIELD=COLUMN for preferences, and likewise data.demonstration_columns and "
            f"data.prompt_columns. {_PREFERENCES} {_DEMONSTRATIONS}"
        )


_DOUBLED = (
    "Both responses begin with the text of the prompt, which then appears twice in what is learned: leave it out of "
    "the responses."
)
_KTO = "SFT imitates desirable rows alone (check `desirable`). Only policy.method=kto learns from undesirable ones."


def reading_of(path: Path, data: DataConfig) -> FileReading:
    """Return the kind of a file from the columns of its first rows: `preferences`, `demonstrations` or `prompts`.

    They are looked up by the column names in `data`, then by the standard ones.

    Raises:
        UserError: it can't be read, is none of these, or is a rating sheet.
    """
    first = first_rows(path, data)

    def readings(name: str) -> Iterator[list[RawRow]]:
        with suppress(UserError):  # the file lacks a column that the config names for another file
            yield list(renamed(RowSource.named(name, path, data)._replace(rows=first)))
        yield first

    for rows in readings("preferences"):
        if shape := shape_of(rows, options_of(data)):
            ignored = _ignored(rows, "preferences", shape.format, shape, options_of(data))
            return FileReading("preferences", shape.name, ignored, note=_drafts(_readable(rows)))
    for name, detect in (("preferences", pairs.detect), ("demonstrations", demonstrations.detect)):
        for rows in readings(name):
            with suppress(UserError):
                return _reading(name, detect(rows, path), rows, data)
    for rows in readings("prompts"):
        if any("prompt" in row.data for row in rows):
            return _reading("prompts", "prompts", rows, data)
    pairs.detect(first, path)
    raise AssertionError("unreachable: no format was found")


def first_rows(path: Path, data: DataConfig, field: str = "") -> list[RawRow]:
    """Return the rows by which the kind of a file is recognised; `field: ` begins the message of an error.

    Raises:
        UserError: the file can't be read, or is a rating sheet, blind or not.
    """
    is_sheet = looks_like_sheet(path)  # a rater's sheet has instructions above the table
    first = [] if is_sheet else list(islice(read_source(path, data.hub.split, data.readers), DETECT_ON))
    if is_sheet or any({"item", "response_a", "response_b"} <= row.data.keys() for row in first):
        raise UserError(
            f"{field}{path} is a rating sheet, not training data. When it is filled in, `tether people status RUN "
            f"--sheet {path}` checks it, and `tether people score {path} --run RUN` scores it."
        )
    if any({"item", "sft", "policy"} <= row.data.keys() for row in first):
        raise UserError(
            f"{path} is the unblinded result of a rating, as human_eval writes it: it says which model wrote what, and "
            "is neither a sheet nor data to learn from. The file preferences.jsonl beside it has the same votes as "
            "data: name that as data.preferences. `tether status RUN --html` shows the result; a filled sheet is "
            "scored with `tether people score SHEET --run RUN`."
        )
    return first


def _readable(rows: Iterable[RawRow]) -> list[Row]:
    return [row.data for row in rows if row.problem is None]


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row))


def _ignored(rows: Sequence[RawRow], kind: str, name: str, shape: Shape | None, options: ReadingOptions) -> list[str]:
    used = used_by(rows, kind, name, shape, options)
    return [column for column in _columns(_readable(rows)) if not used(column)]


def _reading(kind: str, name: str, raws: Sequence[RawRow], data: DataConfig) -> FileReading:
    rows, ignored = _readable(raws), _ignored(raws, kind, name, None, options_of(data))
    if kind == "preferences":
        return FileReading(kind, name, ignored, note=_DOUBLED if _doubled(rows) else "")
    return FileReading(kind, name, ignored, _looks_like_preferences(rows, ignored), _KTO if name == KTO else "")


def _looks_like_preferences(rows: Sequence[Row], ignored: Sequence[str]) -> bool:
    """Return whether rows of another kind have a field of pairs, two columns of responses whose names differ only in
    the side of a pair, or an unused column with lists of responses."""
    columns = _columns(rows)
    if {"chosen", "rejected"}.intersection(columns) or {"a", "b"} <= set(columns):
        return True
    sides: dict[tuple[str, ...], dict[str, set[str]]] = {}
    for column in (name for name in columns if all(map(_may_be_response, (row.get(name) for row in rows)))):
        words = re.findall("[a-z]+|[0-9]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", column).lower())
        rest = tuple(word for word in words if word not in _SIDES)
        if words and (not rest or rest[-1] in _RESPONSES):
            sides.setdefault(rest, {})[column] = _SIDES.intersection(words)
    for same in sides.values():
        for (one, of_one), (other, of_other) in combinations(same.items(), 2):
            if ((of_one and of_other) or (of_one | of_other) & _WORSE) and {one, other}.intersection(ignored):
                return True
    return any(
        column in ("responses", *TEXTS) and isinstance(value := row.get(column), list) and len(value) > 1
        for row in rows for column in ignored
    )  # fmt: skip


def _may_be_response(value: object) -> bool:
    """Return whether a value may be a response or is missing: a text that is no number, or messages."""
    if isinstance(value, str):
        return not re.fullmatch(r"\s*[-+]?[0-9.]+(e[-+]?[0-9]+)?\s*", value, re.I)
    return value is None or isinstance(value, list | dict)


def _doubled(rows: Sequence[Row]) -> bool:
    """Return whether in most rows of texts both responses begin with a prompt of 20 characters or more."""
    begun = 0
    for row in rows:
        prompt, *sides = (str(row.get(name)).strip() for name in ("prompt", "chosen", "rejected"))
        begun += len(prompt) >= 20 and all(side.startswith(prompt) for side in sides)
    return 2 * begun > len(rows)


def _drafts(rows: Sequence[Row]) -> str:
    """Return how many votes of Argilla's records are not submitted; empty if all are."""
    with suppress(BadRow):
        drafts = sum(len(argilla_votes(row, drafts=True) or ()) for row in rows)
        return f"{counted(drafts, 'vote')} of Argilla's records are not submitted, and do not count." if drafts else ""
    return ""
