"""Keeps the rows that the contract judges: texts and facts are in shards on disk, and changing values are in memory.

Analyses of all rows (duplicates, leaks, agreement) use a few numeric columns: counts, flags, and 64-bit hashes of
texts.
In a set of 1.6 million rows, two different texts have the same hash with a probability of 1 in 10 million. About 20
bytes a row stay in memory, and 28 more once texts are read with a tokenizer.

The ledger does not judge rows. It stores the reasons; which rows are quarantined is decided by Great Expectations
(`Ledger.name`), on columns made from these numbers (`data_contracts.rows.columns`).
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.data.config import SplitConfig
from components.data.rows import CanonicalRow, Problem, Row
from data_contracts.rows.measuring import FACTS, Measuring, ShardNotes, item_in, places, write_rows
from data_contracts.rows.shards import FactColumns, Shard

SHARD_ROWS = 10_000
"""Largest number of source rows in a shard."""
_IN_MEMORY = ("noted", "made", "split", "half")
"""Facts that change, or that are read row by row: 4 bytes a row."""


def combined(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Combine hashes, each (n,), in order into one (n,); results are equal if all parts are, and otherwise only by
    chance."""
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    parts = [part * np.uint64(factor) for part, factor in zip(hashes, odd, strict=False)]
    return np.add.reduce(parts)


def first_of_each(wanted: NDArray[np.bool_], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return which rows (n,) of `wanted` (n,) are the first with their hash (n,)."""
    places = np.flatnonzero(wanted)
    _, first = np.unique(hashes[places], return_index=True)
    out = np.zeros_like(wanted)
    out[places[first]] = True
    return out


class Reason(NamedTuple):
    """Why rows fail a check, and how many."""

    text: str
    """The first row's reason."""
    first: int
    """The first failing row: its number, or the value of the facts' field `row`."""
    rows: int


class Ledger:
    """The rows of one kind of data, from one file or several."""

    def __init__(self, path: Path, split: SplitConfig, seed: int, ranked: bool = False) -> None:
        """
        Args:
            path: a folder for the shards.
            ranked: whether rows will be chosen by `rank`.
        """
        self.path, self.split, self.seed, self.ranked = path, split, seed, ranked
        self.shards: list[Shard] = []
        """Shards of the rows, in order; the rows of a file are consecutive."""
        self.starts: list[int] = []
        """The index of each shard's first row."""
        self.facts: Any = np.empty(0, FACTS)
        """Facts of all rows (n,): `FactColumns`, or a structured array."""
        self.out: NDArray[np.bool_] = np.empty(0, bool)
        """Which rows are quarantined so far (n,)."""
        self.named_by: dict[str, NDArray[np.bool_]] = {}
        """Maps a check to its failing rows (n,); a check without failing rows has no entry."""
        self.measured: dict[str, NDArray[Any]] = {}
        """Columns (n,) that come from comparing all rows or from texts; NaN for rows that were not measured."""
        self.roles: dict[str, int] = {}
        """Maps the roles of a prompt's messages, a letter each, to their code."""
        self.extra: tuple[str, ...] = ()
        """Other columns of the source that a user's suite uses. Set them before rows are read."""
        self.extra_kinds: dict[str, list[bool]] = {}
        """For each of them, as `columns.kind_of`, once it is asked for."""
        self.annotators: dict[str, int] = {}
        self.model_votes: Counter[str] = Counter()
        """Number of votes of each model, by annotator name, in completely read rows."""
        self.models: dict[str, int] = {}
        """Maps the name of each compared model to its code."""
        self.files: list[str] = []
        """The files' labels, in reading order."""
        self._file_of: list[int] = []
        """For each shard, the index of its file in `files`."""
        self._codes: dict[str, list[NDArray[np.int64]]] = {"roles": [], "annotators": [], "models": []}
        """For each shard, the codes of its roles, annotators and models in all of them."""
        self._gathered = np.empty(0, np.int64), np.empty(0, np.int64)
        """Row indices, and the numbers of further source rows that were merged into them."""
        self.late: dict[int, list[Problem]] = {}
        """Notes from comparing rows or from texts, by row index."""
        self._generic: dict[str, Callable[[int], str]] = {}
        """Maps a check to a function that describes a failing row (index) without a note of its own."""
        self._keeping_out: dict[str, bool] = {}
        """Maps each check that has failing rows to whether it quarantines them."""

    @property
    def measuring(self) -> Measuring:
        """Return how to measure rows."""
        return Measuring(self.split, self.seed, self.ranked, self.extra)

    def shard_path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.path / f"{number:05d}.arrow"

    def fill(self, rows: Iterable[Row], progress: Callable[[int], None]) -> None:
        """Read all rows in this process, write their shards and load them. The rows of a file must be consecutive."""
        self.path.mkdir(parents=True, exist_ok=True)
        paths: list[Path] = []
        read = 0
        for file, (_, of_file) in enumerate(groupby(rows, lambda row: row.source)):
            while part := list(islice(of_file, SHARD_ROWS)):
                paths.append(self.shard_path(len(paths)))
                write_rows(paths[-1], part, file, self.measuring)
                read += len(part)
                if len(part) == SHARD_ROWS:
                    progress(read)
        self.take(paths)

    def take(self, paths: Sequence[Path]) -> None:
        """Load the shards of all rows, in order."""
        start = 0
        for path in paths:
            shard = Shard(path)
            notes = ShardNotes(**shard.notes())
            if notes.file not in self.files[-1:]:
                self.files.append(notes.file)
            self._file_of.append(len(self.files) - 1)
            for name, codes in self._codes.items():
                codes.append(_in_all(getattr(self, name), getattr(notes, name)))
            self.model_votes.update(notes.model_votes)
            self.shards.append(shard)
            self.starts.append(start)
            start += shard.rows
        facts = self.path.with_name(f"{self.path.name}-facts")
        self.facts = FactColumns(facts, self.shards, FACTS, _IN_MEMORY, {"roles": self._codes["roles"]})
        self.out = np.zeros(start, bool)
        self._gathered = self._listed("gathered")

    def _listed(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the row indices (m,) and the values (m,) of all entries in a column of lists."""
        rows, values = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for number, (start, shard) in enumerate(zip(self.starts, self.shards, strict=True)):
            places, entries = shard.lists(name)
            rows.append(places + start)
            values.append(self._codes[name][number][entries] if name in self._codes else entries)
        return np.concatenate(rows), np.concatenate(values)

    @property
    def votes(self) -> NDArray[np.int64]:
        """Return (row index, annotator's index in `annotators`, position in `Ballot`) of each vote that names its
        annotator."""
        return np.column_stack([*self._listed("annotators"), self._listed("sides")[1]])

    @property
    def compared(self) -> NDArray[np.int64]:
        """Return (row index, index in `models` of the first response's model, and of the second's) for rows that name
        them."""
        rows, models = self._listed("models")
        return np.column_stack([rows[::2], models.reshape(-1, 2)])

    def further(self, name: str, rows: slice = slice(None)) -> list[Any]:
        """Return the values of one of the source's own columns, for all rows or some consecutive ones."""
        place = self.extra.index(name)
        lines = chain.from_iterable(shard.texts("extra") for shard in self.shards)
        return [json.loads(values)[place] for values in islice(lines, rows.start, rows.stop)]

    def place(self, code: int) -> tuple[str, int]:
        """Return a row's file and its number there, from the facts' field `row`."""
        file, number = places(code)
        return self.files[file], number

    def named(self, code: int) -> str:
        """Return a row's name for messages, from the facts' field `row`."""
        file, number = self.place(int(code))
        return f"row {number} of {file}" if len(self.files) > 1 else f"row {number}"

    def of(self, file: str) -> NDArray[np.bool_]:
        """Return which rows come from a file (n,)."""
        return places(self.facts["row"])[0] == (self.files.index(file) if file in self.files else -1)

    def note(self, index: int, problem: Problem) -> None:
        """Add a note that explains a measured value of a row. It does not judge the row."""
        self.late.setdefault(index, []).append(problem)

    def measure(self, column: str, index: NDArray[np.int64], values: Any) -> None:
        """Set `values` (m,) of a column at the rows `index` (m,)."""
        values = np.asarray(values)
        missing, kind = (None, object) if values.dtype == object else (np.nan, np.float32)
        kind = np.float16 if values.dtype == np.bool_ else kind
        self.measured.setdefault(column, np.full(len(self.facts), missing, kind))[index] = values

    def name(self, check: str, lines: NDArray[np.int64], keeps_out: bool, generic: Callable[[int], str]) -> None:
        """Record that the rows `lines` (indices) fail `check`.

        Args:
            keeps_out: whether the rows are quarantined.
            generic: describes a failing row (index) without a note of its own.
        """
        self._generic.setdefault(check, generic)
        if len(lines):
            self.named_by.setdefault(check, np.zeros(len(self.facts), bool))[lines] = True
            self._keeping_out[check] = self._keeping_out.get(check, False) or keeps_out
            if keeps_out:
                self.out[lines] = True

    def rows(self, which: NDArray[np.bool_] | slice = slice(None)) -> NDArray[np.int64]:
        """Return the distinct source rows from which the rows or pairs `which` (n,) were made, as codes (see
        `place`)."""
        index, number = self._gathered
        made = np.zeros(len(self.facts), bool)
        made[which] = True
        return np.unique(np.concatenate([self.facts["row"][made], number[made[index]]]))

    def count(self, which: NDArray[np.bool_] | slice = slice(None)) -> int:
        """Return the number of source rows (`which`: those from which these rows were made); a ranking is one, whatever
        its number of pairs."""
        return len(self.rows(which))

    def reasons(self, file: str | None = None) -> dict[str, Reason]:
        """Return the reasons for quarantined rows (of a file) so far, by check; rows are values of the facts' field
        `row`."""
        by_check: dict[str, Reason] = {}
        here = self.out if file is None else self.out & self.of(file)
        for check, mask in self.named_by.items():
            indices = np.flatnonzero(mask & here)
            if self._keeping_out[check] and len(indices):
                codes = np.unique(self.facts["row"][indices])
                text = self._reason(check, int(indices[0]))
                by_check[check] = Reason(text, int(codes[0]), len(codes))
        return by_check

    def _reason(self, check: str, index: int) -> str:
        wanted = np.arange(len(self.facts)) == index
        ((_, line),) = self._lines(wanted, range(len(self.shards)))
        return next(problem.text for problem in self._problems(index, json.loads(line)) if problem.check == check)

    def good(self, despite: Sequence[str] = ()) -> NDArray[np.bool_]:
        """Return which rows are not quarantined so far (n,); rows that only the checks `despite` keep out count as
        good."""
        if not despite:
            return ~self.out
        out = np.zeros_like(self.out)
        for check, named in self.named_by.items():
            if self._keeping_out[check] and check not in despite:
                out |= named
        return ~out

    def passes(self, check: str) -> NDArray[np.bool_]:
        """Return which rows pass a check (n,)."""
        named = self.named_by.get(check)
        return np.ones(len(self.facts), bool) if named is None else ~named

    def items(self, wanted: NDArray[np.bool_], mixed: bool = False) -> Iterator[tuple[int, CanonicalRow]]:
        """Yield index and canonical form of the good rows `wanted` (n,).

        Args:
            mixed: interleave the files evenly, so that the first rows hold each file in its share of the total: row i
                of a file with n rows is placed at (i + 1/2) / n. By default rows are in order.
        """
        several, noted = mixed and len(self.files) > 1, self.facts["noted"]
        for index, line in self._mixed(wanted) if several else self._lines(wanted, range(len(self.shards))):
            yield index, item_in(line, noted[index])

    def _lines(self, wanted: NDArray[np.bool_], shards: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        for number in shards:
            start, shard = self.starts[number], self.shards[number]
            here = np.flatnonzero(wanted[start : start + shard.rows])
            yield from zip((here + start).tolist(), shard.texts("line", here), strict=True)

    def _mixed(self, wanted: NDArray[np.bool_]) -> Iterator[tuple[int, bytes]]:
        def spread(shards: list[int]) -> Iterator[tuple[float, int, int, bytes]]:
            first = self.starts[shards[0]]
            count = sum(self.shards[number].rows for number in shards)
            for index, line in self._lines(wanted, shards):
                yield (index - first + 0.5) / count, shards[0], index, line

        files = [list(shards) for _, shards in groupby(range(len(self.shards)), self._file_of.__getitem__)]
        for _, _, index, line in heapq.merge(*map(spread, files)):
            yield index, line

    def quarantined(self) -> Iterator[tuple[int, bytes]]:
        """Yield index and quarantine record (one line) of each quarantined row."""
        for start, shard in zip(self.starts, self.shards, strict=False):
            here = np.flatnonzero(self.out[start : start + shard.rows])
            codes = shard.column("row")[here].tolist() if len(here) else []
            for place, code, line in zip(here.tolist(), codes, shard.texts("line", here), strict=True):
                index, row = start + place, json.loads(line)
                data = row["data"] if self.facts["noted"][index] else row
                yield index, quarantine_line(*self.place(code), self._problems(index, row), data)

    def _problems(self, index: int, row: Any) -> list[Problem]:
        """Return why the row `index`, with this line, is quarantined: its notes on failed checks, then failed checks
        without a note."""
        checks = [check for check, named in self.named_by.items() if named[index]]
        read = [Problem(*note) for note in row["notes"]] if self.facts["noted"][index] else []
        notes = [note for note in [*read, *self.late.get(index, ())] if note.check in checks]
        noted = {note.check for note in notes}
        return [*notes, *(Problem(check, self._generic[check](index)) for check in checks if check not in noted)]


def _in_all(codes: dict[str, int], names: Sequence[str]) -> NDArray[np.int64]:
    """Return the codes of `names` in `codes`, adding new names to it."""
    return np.array([codes.setdefault(name, len(codes)) for name in names], np.int64)


def quarantine_line(source: str, number: int, problems: Iterable[Problem], data: Mapping[str, object]) -> bytes:
    """Return a quarantined row with its problems as one line of ASCII JSON, since it may hold text that UTF-8 can't
    encode."""
    reasons = [problem.text.encode("ascii", "backslashreplace").decode() for problem in problems]
    row = {"file": source, "row": number, "reasons": reasons, "data": data}
    # Values that JSON does not have (in Parquet: dates, bytes, NaN) become text.
    row = json.loads(json.dumps(row, default=str), parse_constant=str)
    return (json.dumps(row, sort_keys=True) + "\n").encode()
