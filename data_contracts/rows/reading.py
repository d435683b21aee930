"""Report how a file will be read, which of its columns are ignored, and how to map them, before its rows are judged.

A file can be valid as another kind of data: a file of votes with unknown column names and a `prompt` column is also a
valid file of prompts. So ignored columns are reported, and a file that looks like preferences is not accepted as
another
kind.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.data.config import DataConfig
from components.data.formats import demonstrations, pairs
from components.data.formats.labels import KTO, NUMBERS, WORDS
from components.data.formats.public import TWO_RESPONSES, Shape, shape_of
from components.data.formats.public_fields import TEXTS, ReadingOptions
from components.data.formats.transcripts import ABOUT, is_transcript
from components.data.formats.unread import used_by
from components.data.readers import read_source
from components.data.rows import RawRow
from components.data.words import label_key
from components.human_eval.batch.reading import looks_like_sheet
from data_contracts.rows.gather import DETECT_ON, RowSource, options_of, renamed
from data_contracts.rows.schemas import SourceReading

_BETTER = {"chosen": "rejected", "better": "worse", "best": "worst", "good": "bad", "winner": "loser", "win": "lose",
           "preferred": "dispreferred", "accepted": "rejected", "positive": "negative", "pos": "neg"}  # fmt: skip
_FIRST = {"a": "b", "1": "2", "0": "1", "first": "second", "left": "right", "one": "two"}
_VERDICT = set("label vote choice winner preference preferred verdict judgment judgement decision selected selection "
               "better comparison".split())  # fmt: skip
_ANNOTATOR = re.compile(r"(annotator|rater|worker|labell?er|judge|reviewer)(_?(id|name))?")
_JUDGEMENT = set("safe unsafe harmful harmless toxic good bad correct incorrect wrong right helpful useful approved "
                 "accepted rejected flagged offensive biased liked disliked valid acceptable".split())  # fmt: skip
_PROMPT = set("prompt instruction question query trajectory conversation dialogue dialog post".split())
_RESPONSE = set("response responses answer completion output reply generation candidate summary text resp".split())
_RATING = set("score scores rating ratings reward rewards quality stars grade points upvotes".split())
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_SIMPLE = re.compile(r"[A-Za-z_][\w .-]*")
"""A name that needs no quotes in YAML."""
_ANSWER = set("answer reply response_text completion_text target solution assistant".split())


Columns = dict[str, str | list[str]]
"""Maps a standard field to the ignored column that may hold it; `votes` to several, one for each annotator."""


class FileReading(NamedTuple):
    """What the first rows of a file show about it."""

    kind: str
    format: str
    ignored: list[str]
    names: Columns
    mistaken: bool
    """Whether it looks like preferences but is read as another kind."""
    rated: str = ""
    """The ignored column that may rate the responses of demonstrations; empty if there is none."""
    judged: str = ""
    """The ignored column that may say which demonstrations are good, in words or as true and false; empty if there is
    none."""

    doubled: bool = False
    """Whether both responses of most pairs begin with their prompt."""

    @property
    def left(self) -> str:
        """Return an ignored column that may belong to the prompt; empty if there is none."""
        return next((name for name in ABOUT if name in self.ignored), "")

    def as_json(self, path: Path) -> SourceReading:
        """Return it as JSON, with advice."""
        columns = "demonstration_columns" if "response" in self.names else "columns"
        names = ", ".join(f"{ours}: {_in_yaml(name)}" for ours, name in self.names.items())
        hint = f"To use them, name them: --set 'data.{columns}={{{names}}}'." if self.names else None
        if self.format == KTO and hint is None:
            hint = "Rows that are labelled undesirable are kept out (check `desirable`): SFT must not imitate them."
        if self.rated:
            hint = (
                f"The column `{self.rated}` may rate the responses. SFT imitates them all, so leave bad ones out, or "
                f"learn from pairs: --set data.preferences={path.name} --set data.score.name={self.rated}."
            )
        elif self.judged:
            hint = (
                f"The column `{self.judged}` may say which responses are good. SFT imitates them all. To keep bad ones "
                f"out, name it, --set data.demonstration_columns.label={_in_yaml(self.judged)}, and say in "
                "data.label_values which of its values are desirable and which undesirable."
            )
        if "responses" in self.names:
            hint = (
                f"The column `{self.names['responses']}` has several responses to each prompt. To compare them, add "
                "`scores` (the highest is best) or `ranks` (1 is best), a number for each response, and give the file "
                "as data.preferences."
            )
            if "scores" in self.names:
                hint += f" If `{self.names['scores']}` has them, --set data.columns.scores={self.names['scores']}."
        if self.left and hint is None:
            hint = (
                f"The column `{self.left}` is not read beside `prompt`. If the responses depend on it, write it into "
                "the prompt."
            )
        if self.doubled:
            hint = (
                "Both responses begin with the text of the prompt, which then appears twice in what is learned: "
                "leave it out of the responses."
            )
        if self.mistaken and hint is None:
            hint = "It has columns of preferences, but not all that a pair needs (formats: docs/guide/formats.md)."
        return {"source": self.kind, "file": str(path), "format": self.format, "ignored": self.ignored, "hint": hint}


def _in_yaml(name: str | Sequence[str]) -> str:
    """Return a column's name, or a list of them, as YAML."""
    if not isinstance(name, str):
        return f"[{', '.join(map(_in_yaml, name))}]"
    return name if _SIMPLE.fullmatch(name) else json.dumps(name)


def reading_of(path: Path, data: DataConfig) -> FileReading:
    """Return the kind of a file from the columns of its first rows: `preferences`, `demonstrations`, `prompts` or a
    rating `sheet`.

    The first three are looked up by the column names in `data`, then by the standard ones.

    Raises:
        UserError: it can't be read, is none of these, or reveals who wrote which response.
    """
    if looks_like_sheet(path):  # a rater's sheet has instructions above the table
        return FileReading("sheet", "rating sheet", [], {}, False)
    first = list(islice(read_source(path, data.hub.split, data.readers), DETECT_ON))
    refuse_unblinded(first, path)
    if is_sheet(first):
        return FileReading("sheet", "rating sheet", [], {}, False)

    def readings(name: str) -> Iterator[list[RawRow]]:
        with suppress(UserError):  # the file lacks a column that the config names for another file
            yield list(renamed(RowSource.named(name, path, data)._replace(rows=first)))
        yield first

    for rows in readings("preferences"):
        if shape := shape_of(rows, options_of(data)):
            ignored = _ignored(rows, "preferences", shape.format, shape, options_of(data))
            names = _annotator_of(rows, ignored) if shape.name == TWO_RESPONSES else {}
            return FileReading("preferences", shape.name, ignored, names, False)
    for name, detect in (("preferences", pairs.detect), ("demonstrations", demonstrations.detect)):
        for rows in readings(name):
            with suppress(UserError):
                return _reading(name, detect(rows, path), rows, data)
    for rows in readings("prompts"):
        if any("prompt" in row.data for row in rows):
            return _reading("prompts", "prompts", rows, data)
    pairs.detect(first, path)
    raise AssertionError("unreachable: no format was found")


def is_sheet(rows: Iterable[RawRow]) -> bool:
    """Return whether rows have the columns of a rating sheet."""
    return any({"item", "response_a", "response_b"} <= row.data.keys() for row in rows)


def refuse_ratings(path: Path, field: str, data: DataConfig) -> None:
    """Raise an error if `field`, which expects training data, is given a rating sheet, blind or not.

    Raises:
        UserError: the file is a rating sheet, or can't be read.
    """
    first = list(islice(read_source(path, data.hub.split, data.readers), DETECT_ON))
    refuse_unblinded(first, path)
    if is_sheet(first) or looks_like_sheet(path):
        raise UserError(
            f"{field}: {path} is a rating sheet, not training data. Score it when it is filled in, with "
            f"`tether human-eval score {path} --run RUN`; `tether data check {path}` checks it before."
        )


def refuse_unblinded(rows: Iterable[RawRow], path: Path) -> None:
    """Raise an error if rows are a human_eval file that names the authors of responses.

    Raises:
        UserError: the rows name them.
    """
    if any({"item", "sft", "policy"} <= row.data.keys() for row in rows):
        raise UserError(
            f"{path} is the unblinded result of a rating, as human_eval writes it: it says which model wrote what, and "
            "is neither a sheet nor data to learn from. The file preferences.jsonl beside it has the same votes as "
            "data: name that as data.preferences. `tether report RUN` shows the result; a filled sheet is "
            "scored with `tether human-eval score SHEET --run RUN`."
        )


def _columns(rows: Sequence[RawRow]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows if row.problem is None for column in row.data))


def _ignored(rows: Sequence[RawRow], kind: str, name: str, shape: Shape | None, options: ReadingOptions) -> list[str]:
    used = used_by(rows, kind, name, shape, options)
    return [column for column in _columns(rows) if not used(column)]


def _reading(kind: str, name: str, rows: Sequence[RawRow], data: DataConfig) -> FileReading:
    columns = _columns(rows)
    ignored = _ignored(rows, kind, name, None, options_of(data))
    if kind == "preferences":
        by = _annotator_of(rows, ignored) if name == "votes" else {}
        names = _misspelt(["prompt"], columns, ignored) | _asked(rows, ignored) | by
        return FileReading(kind, name, ignored, names, False, doubled=_doubled(rows))
    names = preference_columns(ignored)
    if not names and kind == "prompts":
        names = _voted_columns(ignored)
    if "a" in names and "prompt" not in columns:
        names = _asked(rows, [*ignored, *columns]) | names
    mistaken = bool(names) or "chosen" in columns or "rejected" in columns or {"a", "b"} <= set(columns)
    if kind == "prompts" and not mistaken and (several := _several_texts(rows, ignored)):
        listed: Columns = {"responses": several}
        if scores := next((column for column in ignored if column != several and _numbers(rows, column)), None):
            listed["scores"] = scores
        return FileReading(kind, name, ignored, listed, True)
    if mistaken and not names:
        names = _misspelt(["chosen", "rejected"], columns, ignored)
    if not names and not mistaken and kind == "prompts":
        answer = next((column for column in ignored if _plain(column) in _ANSWER), None)
        if answer:
            names = {"response": answer}
    taught = kind == "demonstrations" and not mistaken
    rated, judged = (next(found(rows, ignored), "") if taught else "" for found in (_ratings, _judgements))
    return FileReading(kind, name, ignored, names, mistaken, rated, judged)


def _doubled(rows: Sequence[RawRow]) -> bool:
    """Return whether in most rows of texts both responses begin with a prompt of 20 characters or more."""
    texts = [[row.data.get(name) for name in ("prompt", "chosen", "rejected")] for row in rows if row.problem is None]
    prompts = [str(prompt).strip() for prompt, *_ in texts]
    begun = (
        len(prompt) >= 20 and all(str(side).lstrip().startswith(prompt) for side in sides)
        for prompt, (_, *sides) in zip(prompts, texts, strict=True)
    )
    return 2 * sum(begun) > len(texts)


def _annotator_of(rows: Sequence[RawRow], ignored: Sequence[str]) -> Columns:
    """Map `annotator` to an ignored column with the name of one, if rows of votes do not name their annotators."""
    if any("annotator" in row.data or "votes" in row.data for row in rows):
        return {}
    annotator = next((column for column in ignored if _ANNOTATOR.fullmatch(_plain(column))), None)
    return {"annotator": annotator} if annotator else {}


def _asked(rows: Sequence[RawRow], columns: Sequence[str]) -> Columns:
    """Map `prompt` to the first column whose name is one of prompts, if no row has a prompt, turns or a transcript."""
    for row in rows:
        texts = [row.data.get(side) for side in ("chosen", "rejected")]
        if "prompt" in row.data or any(isinstance(each, list) or is_transcript(each) for each in texts):
            return {}
    asked = next((column for column in columns if _PROMPT & set(_plain(column).split("_"))), None)
    return {"prompt": asked} if asked else {}


def _voted_columns(columns: Sequence[str]) -> Columns:
    """Map `a`, `b` and `votes` to columns of two responses, and of an annotator's vote each."""
    plain = {_plain(column): column for column in columns}
    responses = {name: column for name, column in plain.items() if _RESPONSE & set(re.findall("[a-z]+", name))}
    sides = _two(responses, _FIRST)
    if sides is None:
        return {}
    votes = [column for name, column in plain.items() if re.fullmatch(rf"{_ANNOTATOR.pattern}_?[a-z0-9]?\d*", name)]
    return dict(zip(("a", "b"), sides, strict=True)) | ({"votes": votes} if votes else {})


def _numbers(rows: Sequence[RawRow], column: str) -> bool:
    """Return whether a column holds lists of numbers."""
    values = [row.data.get(column) for row in rows if row.problem is None]
    return any(isinstance(value, list) and value for value in values) and all(
        value is None or (isinstance(value, list) and all(type(each) in (int, float) for each in value))
        for value in values
    )


def _several_texts(rows: Sequence[RawRow], columns: Sequence[str]) -> str | None:
    """Return an ignored column with a name of responses that holds lists of texts, which could be compared."""
    for column in columns:
        values = [row.data.get(column) for row in rows if row.problem is None]
        if _plain(column) in ("responses", *TEXTS) and any(
            isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
            for value in values
        ):
            return column
    return None


def _misspelt(fields: Sequence[str], columns: Sequence[str], ignored: Sequence[str]) -> Columns:
    """Map each of `fields` that `columns` lack to an ignored column with nearly its name, if there is one."""
    near = {
        field: difflib.get_close_matches(field, ignored, n=1, cutoff=0.75) for field in fields if field not in columns
    }
    return {field: found[0] for field, found in near.items() if found}


def _ratings(rows: Sequence[RawRow], columns: Sequence[str]) -> Iterator[str]:
    """Yield the columns of numbers whose names suggest that they rate a response."""
    for column in columns:
        if _RATING & set(_plain(column).split("_")):
            values = [row.data.get(column) for row in rows if row.problem is None]
            if all(value is None or type(value) in (int, float) or _NUMBER.fullmatch(str(value)) for value in values):
                yield column


def _judgements(rows: Sequence[RawRow], columns: Sequence[str]) -> Iterator[str]:
    """Yield the columns that judge a response in words such as good and bad, or by true and false under a name such as
    `is_harmful`."""
    for column in columns:
        found = {label_key(value) for row in rows if (value := row.data.get(column)) is not None}
        flag = found <= {"true", "false"} and _JUDGEMENT & set(_plain(column).split("_"))
        if found and (flag or found <= WORDS - NUMBERS):
            yield column


def preference_columns(columns: Sequence[str]) -> Columns:
    """Map standard fields to columns whose names suggest them; empty unless there are two responses and a verdict."""
    plain = {_plain(column): column for column in columns}
    if sides := _two(plain, _BETTER):
        return dict(zip(("chosen", "rejected"), sides, strict=True))
    verdict = next((column for name, column in plain.items() if _VERDICT & set(name.split("_"))), None)
    sides = _two(plain, _FIRST)
    if verdict is None or sides is None:
        return {}
    annotator = next((column for name, column in plain.items() if _ANNOTATOR.fullmatch(name)), None)
    names: Columns = {"a": sides[0], "b": sides[1], "label": verdict}
    return names | ({"annotator": annotator} if annotator and annotator != "annotator" else {})


def _two(plain: Mapping[str, str], words: Mapping[str, str]) -> tuple[str, str] | None:
    """Return two columns whose names differ in one word, or in one last letter or digit, that is a pair of `words`."""
    for name, column in plain.items():
        parts = re.findall(r"[a-z]+?(?=_|\d|$)|\d", name)
        for place, part in enumerate(parts):
            other = words.get(part)
            if other is not None:
                wanted = "".join([*parts[:place], other, *parts[place + 1 :]])
                if found := next((c for n, c in plain.items() if n.replace("_", "") == wanted), None):
                    return column, found
    return None


def _plain(column: str) -> str:
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column)
    return re.sub(r"[^a-z0-9]+", "_", snake.lower()).strip("_")
