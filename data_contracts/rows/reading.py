"""Report how a file will be read, which of its columns are ignored, and how to map them, before its rows are judged.

A file can be valid as another kind of data: a file of votes with unknown column names and a `prompt` column is also a
valid file of prompts. So ignored columns are reported, and a file that looks like preferences is not accepted as
another kind.
"""

import difflib
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.text import counted
from components.data.config import DataConfig
from components.data.formats import demonstrations, pairs
from components.data.formats.labels import KTO, NUMBERS, WORDS, is_side
from components.data.formats.public import TWO_RESPONSES, Shape, shape_of
from components.data.formats.public_fields import TEXTS, ReadingOptions
from components.data.formats.public_votes import argilla_votes
from components.data.formats.transcripts import ABOUT, SYSTEMS, is_empty, is_transcript
from components.data.formats.unread import used_by
from components.data.readers import read_source
from components.data.rows import BadRow, RawRow
from components.data.words import label_key
from components.human_eval.batch.reading import looks_like_sheet
from data_contracts.rows.gather import DETECT_ON, RowSource, options_of, renamed
from data_contracts.rows.schemas import SourceReading

_BETTER = {"chosen": "rejected", "better": "worse", "best": "worst", "good": "bad", "winner": "loser", "win": "lose",
           "preferred": "dispreferred", "accepted": "rejected", "positive": "negative", "pos": "neg",
           "accept": "reject", "w": "l", "j": "k", "correct": "incorrect", "right": "wrong"}  # fmt: skip
_WORSE = set(_BETTER.values())
_ANSWERS = ("response", "output", "completion", "answer", "messages", "conversations")
_FEW = 5
"""Fewer rows do not show which values return."""
_FIRST = {"a": "b", "1": "2", "0": "1", "first": "second", "left": "right", "one": "two"}
_VERDICT = set("label vote choice winner preference preferred verdict judgment judgement decision selected selection "
               "better comparison".split())  # fmt: skip
_PERSON = "(annotator|rater|worker|labell?er|judge|reviewer)"
_ANNOTATOR = re.compile(rf"{_PERSON}(_?(id|name))?")
_VOTES_OF_ONE = re.compile(rf"{_PERSON}_?([a-z]|\d+)")
"""A column with the votes of one annotator."""
_ABOUT = set("id ids idx index uuid hash model models name type source score scores rating ratings reward rewards rank "
             "length len tokens count time date timestamp by reason rationale confidence user annotator rater worker "
             "labeler labeller reviewer url".split())  # fmt: skip
"""Words in names of columns that say something about a prompt, a response or a verdict, and are none."""
_SPLITS = set("train training test testing val valid validation dev eval evaluation held heldout holdout".split())
_MOST_VERDICTS = 7
"""Most distinct values of a column of verdicts: HelpSteer's -3 to 3."""
_JUDGEMENT = set("safe unsafe harmful harmless toxic good bad correct incorrect wrong right helpful useful approved "
                 "accepted rejected flagged offensive biased liked disliked valid acceptable".split())  # fmt: skip
_PROMPT = set("prompt instruction question query trajectory conversation dialogue dialog post".split())
_RESPONSE = set("response responses answer completion output reply generation candidate summary text resp".split())
_RATING = set("score scores rating ratings reward rewards quality stars grade points upvotes".split())
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")
_SIMPLE = re.compile(r"[A-Za-z_][\w .-]*")
"""A name that needs no quotes in YAML."""
_ANSWER = set("answer reply response_text completion_text target solution assistant".split())


Row = Mapping[str, Any]
"""The fields of a readable row."""
Columns = dict[str, str | list[str]]
"""Maps a standard field to the ignored column that may hold it; `votes` to several, one for each annotator."""


class FileReading(NamedTuple):
    """What the first rows of a file show about it."""

    kind: str
    format: str
    ignored: list[str]
    names: Columns
    mistaken: bool = False
    """Whether it looks like preferences but is read as another kind."""
    rated: str = ""
    """The ignored column that may rate the responses of demonstrations; empty if there is none."""
    judged: str = ""
    """The ignored column that may say which demonstrations are good, in words or as true and false; empty if there is
    none."""
    note: str = ""
    """What the values say that is not read; empty if nothing."""
    doubled: bool = False
    """Whether both responses of most pairs begin with their prompt."""

    def as_json(self, path: Path) -> SourceReading:
        """Return it as JSON, with advice."""
        hint = _DOUBLED if self.doubled else " ".join(filter(None, (self._about_columns(path), self.note)))
        if not hint and (left := next((name for name in ABOUT if name in self.ignored), "")):
            hint = (
                f"The column `{left}` is not read beside `prompt`. If the responses depend on it, write it into the "
                "prompt."
            )
        if not hint and self.mistaken:
            hint = "It has columns of preferences, but not all that a pair needs (formats: docs/guide/formats.md)."
        return {
            "source": self.kind, "file": str(path), "format": self.format, "ignored": self.ignored, "hint": hint or None
        }  # fmt: skip

    def _about_columns(self, path: Path) -> str:
        if several := self.names.get("responses"):
            hint = (
                f"The column `{several}` has several responses to each prompt. To compare them, add `scores` (the "
                "highest is best) or `ranks` (1 is best), a number for each response, and give the file as "
                "data.preferences."
            )
            if numbers := next((name for name in ("scores", "ranks") if name in self.names), ""):
                hint += f" If `{self.names[numbers]}` has them, --set data.columns.{numbers}={self.names[numbers]}."
            return hint
        if self.rated:
            return (
                f"The column `{self.rated}` may rate the responses. SFT imitates them all, so leave bad ones out, or "
                f"learn from pairs: --set data.preferences={path.name} --set data.score.name={self.rated}."
            )
        if self.judged:
            return (
                f"The column `{self.judged}` may say which responses are good. SFT imitates them all. To keep bad ones "
                f"out, name it, --set data.demonstration_columns.label={_in_yaml(self.judged)}, and say in "
                "data.label_values which of its values are desirable and which undesirable."
            )
        if self.names:
            return _mapping(self.names)
        return _KTO if self.format == KTO else ""


_SHEET = FileReading("sheet", "rating sheet", [], {})
_DOUBLED = (
    "Both responses begin with the text of the prompt, which then appears twice in what is learned: leave it out of "
    "the responses."
)
_KTO = "Rows that are labelled undesirable are kept out (check `desirable`): SFT must not imitate them."


def _in_yaml(name: str | Sequence[str]) -> str:
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
        return _SHEET
    first = list(islice(read_source(path, data.hub.split, data.readers), DETECT_ON))
    refuse_unblinded(first, path)
    if is_sheet(first):
        return _SHEET

    def readings(name: str) -> Iterator[list[RawRow]]:
        with suppress(UserError):  # the file lacks a column that the config names for another file
            yield list(renamed(RowSource.named(name, path, data)._replace(rows=first)))
        yield first

    for rows in readings("preferences"):
        if shape := shape_of(rows, options_of(data)):
            ignored, readable = _ignored(rows, "preferences", shape.format, shape, options_of(data)), _readable(rows)
            names = _annotator_of(readable, ignored) if shape.name == TWO_RESPONSES else {}
            note = _own_split(readable, ignored) or _drafts(readable)
            return FileReading("preferences", shape.name, ignored, names, note=note)
    for name, detect in (("preferences", pairs.detect), ("demonstrations", demonstrations.detect)):
        for rows in readings(name):
            with suppress(UserError):
                return _reading(name, detect(rows, path), rows, data)
    for rows in readings("prompts"):
        if any("prompt" in row.data for row in rows):
            return _reading("prompts", "prompts", rows, data)
    try:
        pairs.detect(first, path)
    except UserError as error:
        readable = _readable(first)
        names = _preference_columns(readable, _columns(readable))
        if not names:
            raise
        asked = _asked(readable, _texts(readable, _columns(readable)))
        raise UserError(f"{error} {_mapping(asked | names)}") from error
    raise AssertionError("unreachable: no format was found")


def _mapping(names: Columns) -> str:
    option = "demonstration_columns" if "response" in names else "columns"
    listed = ", ".join(f"{ours}: {_in_yaml(name)}" for ours, name in names.items())
    return f"To use them, name them: --set {shlex.quote(f'data.{option}={{{listed}}}')}."


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
            f"`tether people score {path} --run RUN`; `tether data check {path}` checks it before."
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
            "data: name that as data.preferences. `tether status RUN --html` shows the result; a filled sheet is "
            "scored with `tether people score SHEET --run RUN`."
        )


def _readable(rows: Iterable[RawRow]) -> list[Row]:
    return [row.data for row in rows if row.problem is None]


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(column) for row in rows for column in row))


def _values(rows: Sequence[Row], column: str) -> list[Any]:
    """Return the values of a column that say something."""
    return [value for row in rows if not is_empty(value := row.get(column))]


def _words(column: str) -> list[str]:
    """Return the words of a column's name: `is`, `safe` of `isSafe`."""
    snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", column)
    return re.sub(r"[^a-z0-9]+", "_", snake.lower()).strip("_").split("_")


def _plain(column: str) -> str:
    return "_".join(_words(column))


def _ignored(rows: Sequence[RawRow], kind: str, name: str, shape: Shape | None, options: ReadingOptions) -> list[str]:
    used = used_by(rows, kind, name, shape, options)
    return [column for column in _columns(_readable(rows)) if not used(column)]


def _reading(kind: str, name: str, raws: Sequence[RawRow], data: DataConfig) -> FileReading:
    rows, ignored = _readable(raws), _ignored(raws, kind, name, None, options_of(data))
    columns, texts, note = _columns(rows), _texts(rows, ignored), _own_split(rows, ignored)
    if kind == "preferences":
        by = _annotator_of(rows, ignored) if name == "votes" else {}
        names = _misspelt(["prompt"], columns, texts) | _asked(rows, texts) | by
        return FileReading(kind, name, ignored, names, note=note, doubled=_doubled(rows))
    names = _preference_columns(rows, ignored)
    sides = None
    if not names and kind == "prompts":
        sides = _sides_in(texts)
        names = _voted_columns(rows, ignored, sides)
    if names and "prompt" not in columns:
        names = _asked(rows, [*texts, *_texts(rows, columns)]) | names
    mistaken = bool(names or sides) or "chosen" in columns or "rejected" in columns or {"a", "b"} <= set(columns)
    if mistaken:
        names = names or _misspelt(["chosen", "rejected"], columns, texts)
        return FileReading(kind, name, ignored, names, True, note=note)
    if kind == "demonstrations":
        rated = next((column for column in ignored if _rates(rows, column)), "")
        judged = next((column for column in ignored if _judges(rows, column)), "")
        return FileReading(kind, name, ignored, {}, rated=rated, judged=judged, note=note)
    if several := _several_texts(rows, ignored):
        names = {"responses": several}
        if scores := next((column for column in ignored if column != several and _are_numbers(rows, column)), None):
            names["ranks" if pairs.RANKING & set(_words(scores)) else "scores"] = scores
        return FileReading(kind, name, ignored, names, True)
    answer = next((column for column in texts if _plain(column) in _ANSWER), None)
    return FileReading(kind, name, ignored, {"response": answer} if answer else {}, note=note)


def _doubled(rows: Sequence[Row]) -> bool:
    """Return whether in most rows of texts both responses begin with a prompt of 20 characters or more."""
    begun = 0
    for row in rows:
        prompt, *sides = (str(row.get(name)).strip() for name in ("prompt", "chosen", "rejected"))
        begun += len(prompt) >= 20 and all(side.startswith(prompt) for side in sides)
    return 2 * begun > len(rows)


def _annotator_of(rows: Sequence[Row], ignored: Sequence[str]) -> Columns:
    """Map `annotator` to an ignored column with the name of one, if rows of votes do not name their annotators."""
    annotator = None if any("annotator" in row or "votes" in row for row in rows) else _annotator_in(rows, ignored)
    return {"annotator": annotator} if annotator else {}


def _annotator_in(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """Return the column with an annotator's name for each row: short values, of which some return."""
    for column in columns:
        values = [str(value) for value in _values(rows, column)]
        returns = len(set(values)) < len(values) or len(values) < _FEW
        if _ANNOTATOR.fullmatch(_plain(column)) and returns and all(len(value) <= 64 for value in values):
            return column
    return None


def _texts(rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """Return the columns that may hold prompts or responses: texts or messages, under no name of something else."""
    found = []
    for column in columns:
        values, words = _values(rows, column), _words(column)
        numbers = all(_NUMBER.fullmatch(str(value).strip()) for value in values) and not _RESPONSE & set(words)
        texts = all(isinstance(value, str | list | dict) for value in values)
        *_, last = [word for word in words if len(word) > 1 and not word.isdigit()] or [""]
        if values and texts and not numbers and (last in _PROMPT | _RESPONSE or not _ABOUT & set(words)):
            found.append(column)
    return found


def _are_verdicts(rows: Sequence[Row], columns: Sequence[str], known: bool = False) -> bool:
    """Return whether columns hold verdicts: few short words or small numbers; `known`: only words of sides."""
    found = {label_key(value) for column in columns for value in _values(rows, column)}
    return 0 < len(found) <= _MOST_VERDICTS and all(
        abs(float(value)) <= 3 if _NUMBER.fullmatch(value) else len(value) <= 20 and (is_side(value) or not known)
        for value in found
    )


def _own_split(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Return what to do about a column that divides the rows into splits; empty if there is none."""
    for column in columns:
        said = [label_key(value) for value in _values(rows, column)]
        others = [value for value in said if not value.startswith("train")]
        if others and {re.split("[^a-z]", value)[0] for value in said} <= _SPLITS:
            return (
                f"The column `{column}` says {others[0]} in {counted(len(others), 'row')} of the first {len(rows)}. "
                "Tether divides the prompts itself, so a run trains on some of these rows too. To keep them apart, "
                "write them into a file of their own, and name it in data.decontaminate."
            )
    return ""


def _drafts(rows: Sequence[Row]) -> str:
    """Return how many votes of Argilla's records are not submitted; empty if all are."""
    with suppress(BadRow):
        drafts = sum(len(argilla_votes(row, drafts=True) or ()) for row in rows)
        return f"{counted(drafts, 'vote')} of Argilla's records are not submitted, and do not count." if drafts else ""
    return ""


def _asked(rows: Sequence[Row], columns: Sequence[str]) -> Columns:
    """Map `prompt` to the first column whose name is one of prompts, if no row has a prompt, turns or a transcript."""
    for row in rows:
        texts = [row.get(side) for side in ("chosen", "rejected")]
        if "prompt" in row or any(isinstance(each, list) or is_transcript(each) for each in texts):
            return {}
    asked = next((c for c in columns if c not in SYSTEMS and _PROMPT & set(_words(c))), None)
    return {"prompt": asked} if asked else {}


def _sides_in(columns: Sequence[str]) -> tuple[str, str] | None:
    """Return two columns of responses that no verdict parts."""
    plain = {_plain(column): column for column in columns}
    return _two({name: c for name, c in plain.items() if _RESPONSE & set(re.findall("[a-z]+", name))}, _FIRST)


def _voted_columns(rows: Sequence[Row], columns: Sequence[str], sides: tuple[str, str] | None) -> Columns:
    """Map `a`, `b` and `votes` to columns of two responses, and of an annotator's vote each, by names and values."""
    votes = [column for column in columns if _VOTES_OF_ONE.fullmatch(_plain(column))]
    said = [[label_key(row.get(column)) for column in votes] for row in rows]
    ids = len(said) >= _FEW and len(votes) > 1 and all(len(set(row)) == len(row) for row in said)
    if sides is None or not votes or ids or not _are_verdicts(rows, votes, known=True):
        return {}  # ids of annotators, of whom none judges a pair twice, are no votes
    return {"a": sides[0], "b": sides[1], "votes": votes}


def _are_numbers(rows: Sequence[Row], column: str) -> bool:
    values = _values(rows, column)
    lists = all(isinstance(value, list) and all(type(each) in (int, float) for each in value) for value in values)
    return bool(values) and lists


def _several_texts(rows: Sequence[Row], columns: Sequence[str]) -> str | None:
    """Return an ignored column with a name of responses that holds lists of texts, which could be compared."""
    for column in columns:
        if _plain(column) in ("responses", *TEXTS) and any(
            isinstance(value, list) and len(value) > 1 and all(isinstance(each, str) for each in value)
            for value in _values(rows, column)
        ):
            return column
    return None


def _misspelt(fields: Sequence[str], columns: Sequence[str], ignored: Sequence[str]) -> Columns:
    """Map each of `fields` that `columns` lack to an ignored column with nearly its name, if there is one."""
    near = {
        field: difflib.get_close_matches(field, ignored, n=1, cutoff=0.75) for field in fields if field not in columns
    }
    return {field: found[0] for field, found in near.items() if found}


def _rates(rows: Sequence[Row], column: str) -> bool:
    values = _values(rows, column)
    numbers = all(type(value) in (int, float) or _NUMBER.fullmatch(str(value)) for value in values)
    return numbers and bool(_RATING & set(_words(column)))


def _judges(rows: Sequence[Row], column: str) -> bool:
    """Return whether a column judges a response in words such as good and bad, or by true and false under a name such
    as `is_harmful`."""
    found = {label_key(value) for value in _values(rows, column)}
    flag = found <= {"true", "false"} and _JUDGEMENT & set(_words(column))
    return bool(found and (flag or found <= WORDS - NUMBERS))


def _preference_columns(rows: Sequence[Row], columns: Sequence[str]) -> Columns:
    """Map standard fields to columns whose names and values suggest them; empty unless there are two responses and a
    verdict."""
    plain = {_plain(column): column for column in _texts(rows, columns)}
    if sides := _two(plain, _BETTER) or _one_worse(rows, plain):
        return dict(zip(("chosen", "rejected"), sides, strict=True))
    named = (c for c in columns if _VERDICT & set(_words(c)) and not _ABOUT & set(_words(c)))
    verdict = next((column for column in named if _are_verdicts(rows, [column])), None)
    sides = _two(plain, _FIRST)
    if verdict is None or sides is None:
        return {}
    annotator = _annotator_in(rows, columns)
    names: Columns = {"a": sides[0], "b": sides[1], "label": verdict}
    return names | ({"annotator": annotator} if annotator and annotator != "annotator" else {})


def _one_worse(rows: Sequence[Row], plain: Mapping[str, str]) -> tuple[str, str] | None:
    """Return a column of responses and one whose name says that it is the worse (`rejected_answer` of `answer`)."""
    names = {_plain(column): column for column in _columns(rows)}
    for name, column in plain.items():
        words = name.split("_")
        for word in _WORSE.intersection(words):
            rest = "_".join(each for each in words if each != word)
            better = names.get(rest) if rest else next((names[n] for n in _ANSWERS if n in names), None)
            if better is not None and better != column:
                return better, column
    return None


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
