"""From a source to judged rows: read, detect the format, parse, check the schema, find duplicates."""

import hashlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from components.canonical import canonical_json
from components.data import demonstrations, formats
from components.data.config import DataConfig
from components.data.readers import is_gzipped, read_source
from components.data.rows import Problem, RawRow, Row
from components.errors import UserError
from data_contracts.schemas import schema_problems

logger = logging.getLogger(__name__)

DETECT_ON = 1000
_EVERY = 20_000


class Source(NamedTuple):
    """Rows to judge: what they are called in artifacts (never a path), and in messages to the user."""

    name: str
    shown: str
    rows: Iterable[RawRow]
    columns: Mapping[str, str]
    field: str
    """The config field that renames columns."""

    @classmethod
    def named(cls, name: str, path: Path, data: DataConfig) -> "Source":
        """The file or saved folder that `data` names as `preferences` or `demonstrations`."""
        field = "columns" if name == "preferences" else "demonstration_columns"
        return cls(name, str(path), read_source(path, data.hub.split), getattr(data, field), f"data.{field}")


def look_at(name: str, path: Path, data: DataConfig) -> None:
    """Raise at once what reading the whole of a file would end in: a run that can't begin should leave nothing.

    Its first rows are judged, and all only if none of these is valid. A gzipped file is read to its end, as only that
    shows whether it is all there.

    Raises:
        UserError: as `gather_pairs` or `gather_demonstrations`.
    """
    gather = gather_pairs if name == "preferences" else gather_demonstrations
    source = Source.named(name, path, data)
    first = list(islice(source.rows, DETECT_ON))
    if is_gzipped(path):
        deque(source.rows, maxlen=0)
    try:
        gather(source._replace(rows=first), data.max_characters, lambda rows: None)
    except UserError:
        gather(Source.named(name, path, data), data.max_characters, lambda rows: None)


def gather_pairs(source: Source, max_characters: int, progress: Callable[[int], None]) -> list[Row]:
    """Every row of `source` as a preference pair or with its problems.

    Raises:
        UserError: the source can't be read, has no known format, or not one valid row.
    """
    raws, name = _detected(source, formats.detect)
    rows = _checked((formats.parse_pair(raw, name, source.name, max_characters) for raw in raws), progress)
    mark_duplicate_pairs(rows)
    return _some_valid(rows, source, "preference pair")


def gather_demonstrations(source: Source, max_characters: int, progress: Callable[[int], None]) -> list[Row]:
    """Every row of `source` as a demonstration or with its problems. Raises `UserError` as `gather_pairs`."""
    raws, name = _detected(source, demonstrations.detect)
    rows = _checked(
        (demonstrations.parse_demonstration(raw, name, source.name, max_characters) for raw in raws), progress
    )
    mark_duplicate_demonstrations(rows)
    return _some_valid(rows, source, "demonstration")


def _detected(source: Source, detect: Callable[[list[RawRow], object], str]) -> tuple[Iterator[RawRow], str]:
    raws = iter(_renamed(source))
    first = list(islice(raws, DETECT_ON))
    name = detect(first, source.shown)
    logger.info("%s: read as %s", source.shown, name)
    return chain(first, raws), name


def _renamed(source: Source) -> Iterator[RawRow]:
    for position, raw in enumerate(source.rows):
        if source.columns and not raw.problem:
            missing = sorted(set(source.columns.values()) - raw.data.keys())
            if missing and position == 0:
                raise UserError(
                    f"{source.field} names the column {missing[0]!r}, which {source.shown} doesn't have: its columns "
                    f"are {', '.join(raw.data)}. Name one of these."
                )
            taken = {ours: raw.data[theirs] for ours, theirs in source.columns.items() if theirs in raw.data}
            rest = {name: value for name, value in raw.data.items() if name not in source.columns.values()}
            raw = raw._replace(data=rest | taken)
        yield raw


def _checked(rows: Iterable[Row], progress: Callable[[int], None]) -> list[Row]:
    out = []
    for row in rows:
        if row.item is not None and not row.problems:
            row.problems = schema_problems(row.item)
            row.data = row.item if row.problems else {}
        out.append(row)
        if len(out) % _EVERY == 0:
            progress(len(out))
    return out


def _some_valid(rows: list[Row], source: Source, what: str) -> list[Row]:
    if any(not row.problems for row in rows):
        return rows
    reasons = Counter(problem.text for row in rows for problem in row.problems)
    text, count = reasons.most_common(1)[0]
    first = next(row.number for row in rows if any(p.text == text for p in row.problems))
    raise UserError(
        f"{source.shown} has not one valid {what} in {len(rows)} rows. The commonest reason: {text} ({count} rows, the "
        f"first is row {first}). Mend the rows, or map your names with {source.field}."
    )


def mark_duplicate_pairs(rows: list[Row]) -> None:
    """Mark pairs that stand there before, and all pairs whose two responses are also preferred the other way."""
    first: dict[bytes, Row] = {}
    turned: dict[bytes, bytes] = {}
    for row in rows:
        if row.problems or row.item is None:
            continue
        key = _key(row.item["prompt"], row.item["chosen"], row.item["rejected"])
        if key in first:
            row.problems.append(Problem("unique", f"duplicate of row {first[key].number}"))
            row.data = row.item
        else:
            first[key] = row
            turned[key] = _key(row.item["prompt"], row.item["rejected"], row.item["chosen"])
    for key, row in first.items():
        if (other := first.get(turned[key])) is not None:
            row.problems.append(Problem("consistent", f"contradicts row {other.number}"))
            row.data = row.item or {}


def mark_duplicate_demonstrations(rows: list[Row]) -> None:
    first: dict[bytes, int] = {}
    for row in rows:
        if row.problems or row.item is None:
            continue
        key = _key(row.item["prompt"], row.item["response"])
        if first.setdefault(key, row.number) != row.number:
            row.problems.append(Problem("unique", f"duplicate of row {first[key]}"))
            row.data = row.item


def _key(*parts: Any) -> bytes:
    return hashlib.sha256(canonical_json(parts).encode()).digest()[:16]
