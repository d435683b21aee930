"""Rows on their way through the contract: shards on disk hold their texts and facts, memory what changes.

What has to look at all rows (duplicates, leaks, agreement) looks at a few columns of numbers: 64-bit hashes of texts,
of which two differing ones agree by chance in 1 of 10 million sets of 1.6 million rows, counts and flags. About 20
bytes a row stay in memory.

The ledger explains; it does not judge. Which rows are kept out is what a validation of Great Expectations names
(`Ledger.name`), on columns made of these numbers (`data_contracts.rows.columns`).
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.data.checks_config import RowChecks
from components.data.config import SplitConfig
from components.data.rows import CanonicalRow, Problem, Row
from data_contracts.rows.measuring import (
    COMPARED,
    FACTS,
    GATHERED,
    VOTES,
    Measuring,
    ShardNotes,
    places,
    write_rows,
)
from data_contracts.rows.shards import FactColumns, Shard, Shards, value_at

ROW_CHECKS = tuple(RowChecks.model_fields)
SHARD_ROWS = 10_000
"""Rows of the source in a shard, at most."""
_IN_MEMORY = ("noted", "made", "split", "half")
"""Facts that change, or are asked for row by row: 4 bytes a row."""


def combined(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One hash (n,) of several in order, each (n,): equal where all are, else by chance alone."""
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    parts = [part * np.uint64(factor) for part, factor in zip(hashes, odd, strict=False)]
    return np.add.reduce(parts)


def first_of_each(wanted: NDArray[np.bool_], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return the rows (n,) of `wanted` (n,) that are the first with their hash (n,)."""
    places = np.flatnonzero(wanted)
    _, first = np.unique(hashes[places], return_index=True)
    out = np.zeros_like(wanted)
    out[places[first]] = True
    return out


class Reason(NamedTuple):
    """Why rows fail a check."""

    text: str
    """The first row's reason."""
    first: int
    rows: int
    last: int
    """The first and the last of so many rows, by number or by their field `row` of the facts."""


def count_reason(reasons: dict[str, Reason], number: int, problem: Problem) -> None:
    """Count row `number` in, once, whichever of its pairs have the problem."""
    known = reasons.get(problem.check, Reason(problem.text, number, 0, -1))
    if known.last != number:
        reasons[problem.check] = known._replace(rows=known.rows + 1, last=number)


class Ledger:
    """The rows of one kind of data, from one file or several."""

    def __init__(self, path: Path, split: SplitConfig, seed: int, ranked: bool = False) -> None:
        """
        Args:
            path: a folder for the shards.
            ranked: whether rows will be chosen by `rank`.
        """
        self.path, self.split, self.seed, self.ranked = path, split, seed, ranked
        self.shards = Shards([])
        """Of the rows, in their order; the rows of a file stand together."""
        self.texts = Shards([])
        """What the texts show, a shard for each of `shards` once they are read (`data_contracts.findings.texts`)."""
        self.facts: Any = np.empty(0, FACTS)
        """Of all rows (n,): `FactColumns`, or a structured array."""
        self.out: NDArray[np.bool_] = np.empty(0, bool)
        """Which rows validations keep out, so far (n,)."""
        self.named_by: dict[str, NDArray[np.bool_]] = {}
        """Maps a check to the rows (n,) that a validation named; a check that named none has no entry."""
        self.measured: dict[str, NDArray[Any]] = {}
        """Columns (n,) that only the whole shows, NaN where a row was not looked at."""
        self.roles: dict[str, int] = {}
        """Roles of the turns of a prompt, a letter each, and their place."""
        self.extra: tuple[str, ...] = ()
        """Further columns of the source that a user's suite asks for."""
        self.extra_kinds: dict[str, list[bool]] = {}
        """Of each, as `ShardNotes.kinds`."""
        self.annotators: dict[str, int] = {}
        self.model_votes: Counter[str] = Counter()
        """Votes of each model, by the name of its annotator, in rows that were read whole."""
        self.models: dict[str, int] = {}
        """Models whose responses votes compare, by name, and their place."""
        self.files: list[str] = []
        """What the files are called, in the order in which they were read."""
        self._file_of: list[int] = []
        """Of each shard, the place of its file in `files`."""
        self._places: list[tuple[Any, Any]] = []
        """Of each shard, what its annotators and models are in `annotators` and `models`."""
        self._gathered: NDArray[np.int64] = np.empty((0, 2), np.int64)
        self._first_notes: dict[tuple[str, str], tuple[int, str]] = {}
        """By file and check, the index and the text of the first note at reading."""
        self.late: dict[int, list[Problem]] = {}
        """Notes of what only the whole or the texts show, by row index."""
        self._generic: dict[str, Callable[[int], str]] = {}
        """By check, what to say of a row (index) that has no note of its own."""
        self._keeping_out: dict[str, bool] = {}
        """Checks that named rows, and whether they keep them out."""

    def measuring(self, extra: Sequence[str] = ()) -> Measuring:
        """Return how the rows are measured; `extra` are further columns of the source to keep."""
        return Measuring(self.split, self.seed, self.ranked, tuple(extra))

    def shard_path(self, number: int) -> Path:
        """Where a shard stands."""
        return self.path / f"{number:05d}.arrow"

    def fill(self, rows: Iterable[Row], progress: Callable[[int], None], extra: Sequence[str] = ()) -> None:
        """Read all rows in this process, and write and take in their shards. The rows of a file stand together.

        Args:
            extra: further columns of the source to keep.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        read = 0
        for file, (_, of_file) in enumerate(groupby(rows, lambda row: row.source)):
            for part in in_parts(of_file):
                paths.append(self.shard_path(len(paths)))
                write_rows(paths[-1], part, file, self.measuring(extra))
                read += len(part)
                if len(part) == SHARD_ROWS:
                    progress(read)
        self.take(paths, extra)

    def take(self, paths: Sequence[Path], extra: Sequence[str] = ()) -> None:
        """Take in the shards of all rows, which stand in their order."""
        roles: list[NDArray[np.int32]] = []
        self.extra = tuple(extra)
        self.extra_kinds = {name: [False, True, True] for name in extra}
        shards, start = [], 0
        for path in paths:
            shard = Shard(path)
            notes = ShardNotes(**shard.notes())
            if notes.file not in self.files[-1:]:
                self.files.append(notes.file)
            self._file_of.append(len(self.files) - 1)
            roles.append(_in_all(self.roles, notes.roles))
            self._places.append((_in_all(self.annotators, notes.annotators), _in_all(self.models, notes.models)))
            self.model_votes.update(notes.model_votes)
            for check, (place, text) in notes.first.items():
                self._first_notes.setdefault((notes.file, check), (start + place, text))
            for name, (known, booleans, numbers) in notes.kinds.items():
                so_far = self.extra_kinds[name]
                self.extra_kinds[name] = [so_far[0] or known, so_far[1] and booleans, so_far[2] and numbers]
            shards.append(shard)
            start += shard.rows
        self.shards = Shards(shards)
        self.facts = FactColumns(self.shards, FACTS, _IN_MEMORY, {"roles": roles})
        self.out = np.zeros(start, bool)
        self._gathered = self._beside(GATHERED)

    def _beside(self, what: tuple[str, Any, int]) -> NDArray[Any]:
        """Return an array beside the rows of all shards, its first column the row's index."""
        name, dtype, width = what
        parts = [np.empty((0, width), dtype)]
        for start, shard, (annotators, models) in zip(self.shards.starts, self.shards, self._places, strict=False):
            found = shard.array(name, dtype, width).copy()
            found[:, 0] += start
            if what is VOTES and len(found):
                found[:, 1] = annotators[found[:, 1]]
            if what is COMPARED and len(found):
                found[:, 1:] = models[found[:, 1:]]
            parts.append(found)
        return np.concatenate(parts)

    @property
    def votes(self) -> NDArray[np.int32]:
        """Row index, annotator (place in `annotators`) and place in `Ballot` of each vote that names its annotator."""
        return self._beside(VOTES)

    @property
    def compared(self) -> NDArray[np.int32]:
        """Row index and the models (places in `models`) of its first and second response, where the row names them."""
        return self._beside(COMPARED)

    def further(self, name: str, rows: slice = slice(None)) -> list[Any]:
        """Return the values of a further column of the source, of all rows or some that stand together."""
        place = self.extra.index(name)
        start, stop, _ = rows.indices(len(self.facts))
        return [
            json.loads(values)[place]
            for _, shard, here in self.shards.over(start, stop)
            for values in shard.texts("extra", np.arange(here.start, here.stop))
        ]

    def place(self, code: int) -> tuple[str, int]:
        """Return the file of a row, by its field `row` of the facts, and the row's number there."""
        file, number = places(code)
        return self.files[file], number

    def named(self, code: int) -> str:
        """Return a row, by its field `row` of the facts, for a message."""
        file, number = self.place(int(code))
        return f"row {number} of {file}" if len(self.files) > 1 else f"row {number}"

    def of(self, file: str) -> NDArray[np.bool_]:
        """Return which rows are of a file (n,)."""
        return places(self.facts["row"])[0] == (self.files.index(file) if file in self.files else -1)

    def note(self, index: int, problem: Problem) -> None:
        """Add a sentence that explains a measured value of a row. It does not judge the row."""
        self.late.setdefault(index, []).append(problem)

    def measure(self, column: str, index: NDArray[np.int64], values: Any) -> None:
        """Set `values` (m,) of a column at the rows `index` (m,)."""
        values = np.asarray(values)
        kind = np.float16 if values.dtype == np.bool_ else np.float32
        self.measured.setdefault(column, np.full(len(self.facts), np.nan, kind))[index] = values

    def shown(self, column: str, rows: slice) -> Any:
        """Return a column that the texts show of some rows that stand together, missing where a row was not read."""
        start, stop, _ = rows.indices(len(self.facts))
        named = column == "language"
        found = np.full(stop - start, None if named else np.nan, object if named else np.float32)
        for number, _, here in self.shards.over(start, stop) if len(self.texts) else ():
            texts = self.texts[number]
            if named or column in texts.names:
                places_ = texts.column("place")
                inside = (places_ >= here.start) & (places_ < here.stop)
                at = self.shards.starts[number] - start + places_[inside]
                values = np.array(texts.notes()["languages"], object) if named else texts.column(column)
                if len(values):
                    found[at] = values[inside]
        return found

    def name(self, check: str, lines: NDArray[np.int64], keeps_out: bool, generic: Callable[[int], str]) -> None:
        """Record that a validation names the rows `lines` (indices) under `check`.

        Args:
            keeps_out: whether the rows are quarantined; else they stay.
            generic: what to say of a row (index) that has no note of its own.
        """
        self._generic.setdefault(check, generic)
        if len(lines):
            self.named_by.setdefault(check, np.zeros(len(self.facts), bool))[lines] = True
            self._keeping_out[check] = self._keeping_out.get(check, False) or keeps_out
            if keeps_out:
                self.out[lines] = True

    def rows(self, which: NDArray[np.bool_] | slice = slice(None)) -> NDArray[np.int64]:
        """Return the rows of the files, each once, that the pairs or other rows `which` (n,) were made of (see
        `place`)."""
        index, number = self._gathered.T
        made = np.zeros(len(self.facts), bool)
        made[which] = True
        return np.unique(np.concatenate([self.facts["row"][made], number[made[index]]]))

    def count(self, which: NDArray[np.bool_] | slice = slice(None)) -> int:
        """Return how many rows the files have (`which`: that those were made of); a ranking is one, whatever its
        pairs."""
        return len(self.rows(which))

    def reasons(self, file: str | None = None) -> dict[str, Reason]:
        """Why rows (of a file) are kept out, so far, by the check they fail; rows by their field `row` of the facts."""
        found: dict[str, Reason] = {}
        here = self.out if file is None else self.out & self.of(file)
        for check, mask in self.named_by.items():
            indices = np.flatnonzero(mask & here)
            if self._keeping_out[check] and len(indices):
                codes = np.unique(self.facts["row"][indices])
                found[check] = Reason(self._said(check, int(indices[0])), int(codes[0]), len(codes), int(codes[-1]))
        return found

    def _said(self, check: str, index: int) -> str:
        """Why the row `index` fails `check`."""
        source = self.place(int(value_at(self.facts, "row", index)))[0]
        first, text = self._first_notes.get((source, check), (-1, ""))
        late = (problem.text for problem in self.late.get(index, ()) if problem.check == check)
        return text if first == index else next(late, None) or self._generic[check](index)

    def good(self) -> NDArray[np.bool_]:
        """Return which rows nothing keeps out, so far (n,)."""
        return ~self.out

    def passes(self, check: str) -> NDArray[np.bool_]:
        """Return which rows pass a check (n,)."""
        named = self.named_by.get(check)
        return np.ones(len(self.facts), bool) if named is None else ~named

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Index and line of every row, in order."""
        for start, shard in zip(self.shards.starts, self.shards, strict=False):
            yield from enumerate(shard.texts("line"), start)

    def mixed_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the same, the files spread evenly over each other: the first rows hold each file in its share of all.

        Whoever takes so many first rows then takes them from all files. Row i of a file of n stands at (i + 1/2) / n.
        """
        files: list[list[tuple[int, Shard]]] = [[] for _ in self.files]
        for file, start, shard in zip(self._file_of, self.shards.starts, self.shards, strict=False):
            files[file].append((start, shard))

        def spread(file: int) -> Iterator[tuple[float, int, int, bytes]]:
            count, place = sum(shard.rows for _, shard in files[file]), 0
            for start, shard in files[file]:
                for index, line in enumerate(shard.texts("line"), start):
                    yield (place + 0.5) / count, file, index, line
                    place += 1

        for _, _, index, line in heapq.merge(*map(spread, range(len(files)))):
            yield index, line

    def items(self, wanted: NDArray[np.bool_], mixed: bool = False) -> Iterator[tuple[int, CanonicalRow]]:
        """Index and canonical form of the rows of `wanted` (n,), which are good ones, in order or as `mixed_lines`."""
        if mixed and len(self.files) > 1:
            for index, line in self.mixed_lines():
                if wanted[index]:
                    yield index, self.item_of(index, line)
            return
        for start, shard in zip(self.shards.starts, self.shards, strict=False):
            here = np.flatnonzero(wanted[start : start + shard.rows])
            for place, line in zip(here.tolist(), shard.texts("line", here), strict=True):
                yield start + place, self.item_of(start + place, line)

    def item_of(self, index: int, line: bytes) -> CanonicalRow:
        """Return the canonical form of a good row, from its line."""
        row: Any = json.loads(line)
        item: CanonicalRow = row["item"] if self.facts["noted"][index] else row
        return item

    def quarantined(self) -> Iterator[tuple[int, bytes]]:
        """Index and quarantine record, a line each, of the rows that are kept out."""
        for start, shard in zip(self.shards.starts, self.shards, strict=False):
            here = np.flatnonzero(self.out[start : start + shard.rows])
            codes = shard.column("row")[here].tolist() if len(here) else []
            for place, code, line in zip(here.tolist(), codes, shard.texts("line", here), strict=True):
                index, row = start + place, json.loads(line)
                noted = self.facts["noted"][index]
                notes = [Problem(*note) for note in row["notes"]] if noted else []
                problems = self._problems(index, [*notes, *self.late.get(index, ())])
                yield index, quarantine_line(*self.place(code), problems, row["data"] if noted else row)

    def _problems(self, index: int, notes: list[Problem]) -> list[Problem]:
        """Why the row `index` is kept out: its notes on the checks that name it, then checks without a note."""
        checks = [check for check, named in self.named_by.items() if named[index]]
        said = [note for note in notes if note.check in checks]
        noted = {note.check for note in said}
        return [*said, *(Problem(check, self._generic[check](index)) for check in checks if check not in noted)]


def in_parts(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """`rows` in lists of `SHARD_ROWS`, the last one shorter."""
    remaining = iter(rows)
    while part := list(islice(remaining, SHARD_ROWS)):
        yield part


def _in_all(known: dict[str, int], names: Sequence[str]) -> NDArray[np.int32]:
    """Return what the codes of `names` are in all that is `known`, which gets those that are new."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int32)


def quarantine_line(source: str, number: int, problems: Iterable[Problem], data: Mapping[str, object]) -> bytes:
    """Return a row that was kept out, and why, as a line of JSON in ASCII: it may hold what UTF-8 can't."""
    reasons = [problem.text.encode("ascii", "backslashreplace").decode() for problem in problems]
    row = {"file": source, "row": number, "reasons": reasons, "data": data}
    # What JSON doesn't know (of a Parquet file: dates, bytes, NaN) becomes text.
    row = json.loads(json.dumps(row, default=str), parse_constant=str)
    return (json.dumps(row, sort_keys=True) + "\n").encode()
