"""Read a source's rows one by one: detect the format, parse, and check the schema."""

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.hashing import canonical_json
from components.base.text import counted
from components.data.checks_config import UNUSABLE
from components.data.config import DataConfig, DecisionConfig, ReaderPlugin
from components.data.formats import demonstrations, pairs
from components.data.formats.gathered_rows import gather_votes
from components.data.formats.prompts import parse_prompt
from components.data.formats.public import shape_of, standard_rows
from components.data.formats.public_fields import ReadingOptions, votes_of_columns
from components.data.formats.public_scores import narrow
from components.data.formats.unread import unread, used_by
from components.data.readers import is_gzipped, read_source
from components.data.rows import Problem, RawRow, Row, listed
from data_contracts.rows.decided import by_votes
from data_contracts.rows.ledger import Reason
from data_contracts.rows.schemas import schema_problems

logger = logging.getLogger(__name__)

DETECT_ON = 1000
REMEDIES = {
    "template_takes": (
        "If it refuses or leaves out system messages, put them before the first question with "
        "sft.system_in_question=true. Otherwise give a chat template that takes them as sft.chat_template."
    ),
    "template_agrees": (
        "Give a chat template that renders such conversations unchanged as sft.chat_template. If it ends a response "
        "with plain text, name that text in generation.stop."
    ),
    "votes_valid": "Correct the votes, or say what their values mean with data.label_values.",
    "decided": "Give more votes, lower data.decision.minimum or data.decision.margin, or have experts decide.",
    "text_clean": "Remove these characters. If the file is in another encoding, save it again in UTF-8.",
    "no_placeholder": "Sample these again; where they are right, set data.checks.no_placeholder.severity=warn.",
    "differ_truncated": "Raise generation.max_new_tokens, or give shorter responses.",
}
"""Maps a check to advice, where fixing rows or mapping column names is not the right advice."""
_COLUMNS = {"preferences": "columns", "demonstrations": "demonstration_columns", "prompts": "prompt_columns"}


@dataclass(frozen=True)
class FileRows:
    """The rows of a file or saved folder, read anew each time."""

    path: Path
    split: str = "train"
    readers: Mapping[str, ReaderPlugin] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RawRow]:
        return read_source(self.path, self.split, self.readers)


class RowSource(NamedTuple):
    """A source of rows: its name in artifacts (never a path), and its name in messages to the user."""

    name: str
    """The kind of data."""
    title: str
    rows: Iterable[RawRow]
    columns: Mapping[str, str | Sequence[str]]
    field: str
    """The config option that maps its column names."""
    label: str = ""
    """The source's name in its rows, if that isn't `name`."""
    decision: DecisionConfig = DecisionConfig()
    """When votes decide a preference pair."""
    options: ReadingOptions = ReadingOptions()
    """The meaning of label values, and the smallest score difference that makes a pair."""
    reward_columns: Sequence[str] = ()
    """Columns to keep in addition to the prompt, for reward sources."""
    extra: tuple[str, ...] = ()
    """Other columns of the source that a user's suite uses."""
    needs_one: bool = True
    """Whether at least one row must be valid. It is not an error if a batch's votes decide no pair."""
    unread: Counter[str] | None = None
    """Counts the rows that say something in a field which is not read, by the field's name (`unread`)."""

    @classmethod
    def named(cls, name: str, path: Path, data: DataConfig, label: str = "") -> "RowSource":
        """Return the source for a file or saved folder given as `preferences`, `demonstrations` or `prompts` in
        `data`."""
        field = _COLUMNS[name]
        return cls(
            name,
            str(path),
            FileRows(path, data.hub.split, data.readers),
            getattr(data, field),
            f"data.{field}",
            label,
            data.decision,
            options_of(data),
            () if name == "preferences" and data.prompts is not None else data.reward_columns,
            unread=Counter(),
        )

    @property
    def file(self) -> str:
        """Return the file label that its rows get."""
        return self.label or self.name


def look_at(name: str, path: Path, data: DataConfig) -> None:
    """Check the beginning of a file, so that a run with an unreadable file fails before it creates anything.

    The first rows are judged, and all rows only if none of these is valid. A gzipped file is read to its end, because
    only then is it known to be complete.

    Raises:
        UserError: the source can't be read, has no known format, or has no valid row.
    """
    source = RowSource.named(name, path, data)
    first = list(islice(source.rows, DETECT_ON))
    readable = [raw.data for raw in first if raw.problem is None]
    for column in source.reward_columns:
        if readable and not any(column in data for data in readable):
            raise UserError(
                f"data.reward_columns names the column {column!r}, which {source.title} doesn't have: its columns are "
                f"{listed(list(readable[0]))}. Name one of these, or add it to the rows."
            )
    if is_gzipped(path):
        deque(source.rows, maxlen=0)
    if any(not row.problems for row in judged_rows(source._replace(rows=first), data.max_characters)):
        return
    rows = judged_rows(source, data.max_characters)
    texts: dict[str, dict[int, str]] = {}
    numbers: set[int] = set()
    for row in rows:
        numbers.add(row.number)
        if not row.problems:
            return
        for problem in row.problems:
            texts.setdefault(problem.check, {}).setdefault(row.number, problem.text)
    firsts = {check: next(iter(of_rows.items())) for check, of_rows in texts.items()}
    reasons = {check: Reason(text, number, len(texts[check])) for check, (number, text) in firsts.items()}
    raise not_one_valid(source, len(numbers), reasons)


def judged_rows(source: RowSource, max_characters: int) -> Iterator[Row]:
    """Yield every row of `source` as a pair (several for a ranking), demonstration or prompt, or with its problems.

    Raises:
        UserError: the source can't be read, or has no known format.
    """
    name, raws = detected(source)
    yield from parsed(raws, name, source, max_characters)


def detected(source: RowSource) -> tuple[str, Iterable[RawRow]]:
    """Return the format of `source`, and its rows with standard column names, in a form that this format accepts.

    Raises:
        UserError: the source can't be read, or has no known format.
    """
    raws = renamed(source)
    first = list(islice(raws, DETECT_ON))
    shape = shape_of(first, source.options) if source.name == "preferences" else None
    if source.name == "preferences":
        name = shape.format if shape else pairs.detect(first, source.title, source.options.score)
    elif source.name == "demonstrations":
        name = demonstrations.detect(first, source.title)
    else:
        name = "prompts"
    used = used_by(first, source.name, name, shape, source.options)
    every: Iterable[RawRow] = _counting(chain(first, raws), source, used)
    if source.name == "preferences":
        every = standard_rows(every, shape, source.options)
        if shape is not None and name == "votes":
            start = list(islice(every, DETECT_ON))
            every = chain(start, every)
            name = pairs.SINGLE_VOTES if any("annotator" in row.data for row in start) else name
        if name == pairs.SINGLE_VOTES:
            name, every = "votes", gather_votes(every)
    logger.info("%s: read as %s", source.title, shape.name if shape else name)
    return name, every


def _counting(rows: Iterable[RawRow], source: RowSource, used: Callable[[str], bool]) -> Iterator[RawRow]:
    for row in rows:
        if row.problem is None and source.unread is not None:
            columns = unread(row.data, used, source.options.score)
            source.unread.update(columns.difference(source.reward_columns, source.extra))
        yield row


def parsed(raws: Iterable[RawRow], name: str, source: RowSource, max_characters: int) -> Iterator[Row]:
    """Yield the parsed rows of `source` in the format `name`, as `judged_rows`. Each depends on its own row only."""
    for raw in raws:
        for row in _parsed(raw, name, source, max_characters):
            if row.item is not None and source.reward_columns and source.name != "demonstrations":
                row.item["columns"] = {
                    name: _plain(raw.data[name]) for name in source.reward_columns if name in raw.data
                }
                row.raw = row.raw if row.problems else raw
                row.problems += _unwritable(row.item["columns"])
            if row.item is not None and not any(p.check in UNUSABLE and p.check != "desirable" for p in row.problems):
                broken = schema_problems(row.item)
                row.raw = row.raw._replace(data=row.item) if broken and not row.problems else row.raw
                row.problems += broken
            yield row


def _plain(value: Any) -> JsonValue:
    """Return a column's value as JSON; values that JSON does not have (a date, NaN) become text."""
    try:
        canonical_json(value)
    except (TypeError, ValueError):
        return str(value)
    return value


def _unwritable(columns: Mapping[str, JsonValue]) -> Iterator[Problem]:
    """Return the columns with text that cannot be encoded as UTF-8, such as bytes of a file that is not UTF-8."""
    for name, value in columns.items():
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            yield Problem("text_clean", f"column `{name}` has a character that UTF-8 cannot encode")


def _parsed(raw: RawRow, name: str, source: RowSource, max_characters: int) -> list[Row]:
    if source.name == "preferences":
        rows = by_votes(raw, name, source.file, max_characters, source.decision)
        for row in rows:
            _decide_by_margin(row, raw, source.options.threshold)
        return rows
    if source.name == "demonstrations":
        return [demonstrations.parse_demonstration(raw, name, source.file, max_characters, source.options.label_values)]
    row = parse_prompt(raw, max_characters)
    if row.item is not None:
        row.item |= {"category": pairs.category_of(raw.data), "source": source.file, "row": raw.number}
    return [row]


def _decide_by_margin(row: Row, raw: RawRow, threshold: float) -> None:
    margin = row.item.get("margin") if row.item is not None else None
    if threshold and margin is not None and margin <= threshold and not any(p.check == "decided" for p in row.problems):
        row.problems.append(Problem("decided", narrow(margin, threshold)))
        row.raw = raw


def renamed(source: RowSource) -> Iterator[RawRow]:
    """Yield the rows of `source` with standard column names. Raises UserError if the first lacks a column that the
    config names."""
    for position, raw in enumerate(source.rows):
        if source.extra:
            raw = raw._replace(extra={name: raw.data.get(name) for name in source.extra})
        if source.columns and not raw.problem:
            columns = source.columns.values()
            named = {name for theirs in columns for name in ([theirs] if isinstance(theirs, str) else theirs)}
            missing = sorted(named - raw.data.keys())
            if missing and position == 0:
                raise UserError(
                    f"{source.field} names the column {missing[0]!r}, which {source.title} doesn't have: its columns "
                    f"are {listed(list(raw.data))}. Name one of these."
                )
            taken = {
                ours: raw.data[theirs] if isinstance(theirs, str) else votes_of_columns(raw.data, theirs)
                for ours, theirs in source.columns.items()
                if not isinstance(theirs, str) or theirs in raw.data
            }
            rest = {name: value for name, value in raw.data.items() if name not in named}
            raw = raw._replace(data=rest | taken)
        yield raw


def options_of(data: DataConfig) -> ReadingOptions:
    """Return the config's options for labels and scores."""
    return ReadingOptions(data.label_values, data.score.name, data.score.threshold)


def not_one_valid(
    source: RowSource, rows: int, reasons: Mapping[str, Reason], named: Callable[[int], str] = "row {}".format
) -> UserError:
    """Return the error for a source in which none of `rows` rows is valid. `reasons` is by check; `named` names a
    row."""
    what = {"preferences": "preference pair", "demonstrations": "demonstration", "prompts": "prompt"}[source.name]
    check, reason = max(reasons.items(), key=lambda item: item[1].rows)
    remedy = REMEDIES.get(check, f"Correct the rows, or map your names with {source.field}.")
    return UserError(
        f"{source.title} has no valid {what} in {counted(rows, 'row')}. The most common reason: {reason.text} "
        f"({counted(reason.rows, 'row')}, the first is {named(reason.first)}). {remedy}"
    )
