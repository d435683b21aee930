"""Rows on their way through the contract: their texts on disk, of each a few numbers in memory.

What has to look at all rows (duplicates, leaks, agreement) looks at the numbers: 64-bit hashes of texts, of which two
differing ones agree by chance in 1 of 10 million sets of 1.6 million rows, counts and flags; about 170 bytes a row.

The ledger measures and explains; it does not judge. Which rows are kept out is what a validation of Great Expectations
names (`Ledger.name`), on columns made of these numbers (`data_contracts.rows.columns`).
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming
from components.base.jsonl import json_line
from components.data.checks_config import RowChecks
from components.data.config import SplitConfig
from components.data.rows import Ballot, CanonicalRow, Problem, Row, is_model
from components.data.splits import SPLITS, loose_key, prompt_key, split_of
from components.data.words import words_of
from components.human_eval.batch.halves import may_train

ROW_CHECKS = tuple(RowChecks.model_fields)
VOTES_ONCE = "votes_once"
"""The check whose rows stay: their extra votes are left out instead."""
WHOLE = "whole"
"""The value of the column `reading` for a row that was read to its end."""
STOPPED = {
    "readable": "unreadable",
    "fields_present": "fields_missing",
    "turns_valid": "turns_broken",
    "prompts_agree": "prompts_differ",
    "votes_valid": "votes_broken",
    "votes_once": "second_vote",
}
"""Maps the check that ended the reading of a row to the row's value in the column `reading`."""
READINGS = (WHOLE, *STOPPED.values(), "undecided")
"""Every value of the column `reading`. An undecided row has no two responses to compare."""

FACTS = np.dtype(
    [
        ("row", "i8"),  # its file and its number there (`Ledger.place`)
        ("noted", "?"),  # its line is a record with item, source fields and notes, else its item
        ("made", "?"),  # it has a canonical form
        ("reading", "i1"),  # place in READINGS
        ("roles", "i4"),  # place in `Ledger.roles`; -1 where the row could not be read, as below
        ("turns", "i4"),  # messages of the prompt
        ("characters", "i4"),  # of the prompt and the longer response
        ("empty", "i2"),  # texts that a reader sees nothing in
        ("unclean", "i2"),  # texts with a control or replacement character
        ("marked", "i2"),  # texts with a marker of a chat template
        ("same", "i1"),  # the two responses are one
        ("lead", "f8"),  # of the most frequent answer over the next, as a share of the votes; 0 for a tie, NaN without
        ("deciding", "i4"),  # votes that decide the pair; -1 where experts or a model of the annotators do
        ("given_out", "?"),  # Tether gave the pair out to label
        ("margin", "f8"),  # NaN without
        ("repeated", "i1"),  # an annotator voted twice on it
        ("undesirable", "i1"),  # a demonstration labelled so
        ("split", "i1"),  # place in SPLITS
        ("prompt", "u8"),  # 0 where the row could not be read
        ("loose", "u8"),  # the prompt but for case, punctuation and white space
        ("half", "i1"),  # of a prompt that people judged in a batch: 1 may train, 0 only judges; else -1
        ("chosen", "u8"),
        ("rejected", "u8"),
        ("rank", "u8"),  # what max_pairs chooses by
        ("words", "i4", (2,)),  # (`words_of`) of the chosen and the rejected response; -1 without
        ("first_wins", "i1"),  # -1 where the format has no order
        ("ballot", "i4", (3,)),  # votes for the first, the second, neither
        ("voted", "?"),
        ("of_models", "i4"),  # votes that models cast
    ]
)
_COUNTED = {"texts_filled": "empty", "text_clean": "unclean", "no_markers": "marked"}
"""Checks whose notes are counted: one for each text."""
_CHUNK = 20_000
_RESPONSES: tuple[Literal["chosen", "rejected", "response"], ...] = ("chosen", "rejected", "response")
_FILE = 40
"""Bits for a row's number in its file; those above say which file."""


def hash64(*parts: str) -> int:
    """The first 8 bytes of the sha256 of texts (lone surrogates allowed)."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()[:8], "big")


def combined(*hashes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One hash (n,) of several in order, each (n,): equal where all are, else by chance alone."""
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
    parts = [part * np.uint64(factor) for part, factor in zip(hashes, odd, strict=False)]
    return np.add.reduce(parts)


def first_of_each(wanted: NDArray[np.bool_], hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """The rows (n,) of `wanted` (n,) that are the first with their hash (n,)."""
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
        """`ranked`: whether rows will be chosen by `rank`."""
        self.path, self.split, self.seed, self.ranked = path, split, seed, ranked
        self.facts: NDArray[Any] = np.empty(0, FACTS)
        self.out: NDArray[np.bool_] = np.empty(0, bool)
        """Which rows validations keep out, so far (n,)."""
        self.named_by: dict[str, NDArray[np.bool_]] = {}
        """Maps a check to the rows (n,) that a validation named; a check that named none has no entry."""
        self.measured: dict[str, NDArray[Any]] = {}
        """Columns (n,) that only the whole or the texts show, NaN where a row was not looked at."""
        self.roles: dict[str, int] = {}
        """Roles of the turns of a prompt, a letter each, and their place."""
        self.extra: dict[str, list[Any]] = {}
        """Further columns of the source that a user's suite asks for, a value a row."""
        self.votes: NDArray[np.int32] = np.empty((0, 3), np.int32)
        """Row index, annotator (place in `annotators`) and place in `Ballot` of each vote that names its annotator."""
        self.annotators: dict[str, int] = {}
        self.model_votes: Counter[str] = Counter()
        """Votes of each model, by the name of its annotator, in rows that were read whole."""
        self.models: dict[str, int] = {}
        """Models whose responses votes compare, by name, and their place."""
        self.compared: NDArray[np.int32] = np.empty((0, 3), np.int32)
        """Row index and the models (places in `models`) of its first and second response, where the row names them."""
        self.gathered: NDArray[np.int64] = np.empty((0, 2), np.int64)
        """Row index, and number of a further row of the source that it was gathered from."""
        self.files: list[str] = []
        """What the files are called, in the order in which they were read."""
        self._starts: list[int] = []
        """Place of the first row of each in the ledger's own file (bytes)."""
        self._first_notes: dict[tuple[str, str], tuple[int, str]] = {}
        """By file and check, the index and the text of the first note at reading."""
        self.late: dict[int, list[Problem]] = {}
        """Notes of what only the whole or the texts show, by row index."""
        self._generic: dict[str, Callable[[int], str]] = {}
        """By check, what to say of a row (index) that has no note of its own."""
        self._keeping_out: dict[str, bool] = {}
        """Checks that named rows, and whether they keep them out."""

    def fill(self, rows: Iterable[Row], progress: Callable[[int], None], extra: Sequence[str] = ()) -> None:
        """Read all rows, writing each as a line: its canonical JSON, or a record of it, its source fields and notes.

        The rows of a file stand together.

        Args:
            extra: further columns of the source to keep.
        """
        parts, lines, votes, named, gathered, compared = [], [], [self.votes], [], [], []
        self.extra = {name: [] for name in extra}
        with naming(self.path), self.path.open("wb") as out:
            for index, row in enumerate(rows):
                if row.source not in self.files[-1:]:
                    self.files.append(row.source)
                    self._starts.append(out.tell())
                lines.append(self._facts(row))
                named += [(index, self.annotators.setdefault(a, len(self.annotators)), side) for a, side in row.votes]
                self.model_votes.update(name for name, _ in row.cast if name is not None and is_model(name))
                gathered += [(index, self._code(number)) for number in row.others]
                if row.models is not None:
                    one, other = (self.models.setdefault(model, len(self.models)) for model in row.models)
                    compared.append((index, one, other))
                for name, values in self.extra.items():
                    values.append(row.extra.get(name))
                out.write(self._line(index, row))
                if len(lines) == _CHUNK:
                    parts.append(np.array(lines, FACTS))
                    votes.append(_votes(named))
                    lines, named = [], []
                    progress(index + 1)
        self.facts = np.concatenate([*parts, np.array(lines, FACTS)])
        self.out = np.zeros(len(self.facts), bool)
        self.votes = np.concatenate([*votes, _votes(named)])
        self.compared = _votes(compared)
        self.gathered = np.array(gathered, np.int64).reshape(-1, 2)

    def _line(self, index: int, row: Row) -> bytes:
        if row.item is not None and not row.problems:
            return json_line(row.item)
        for problem in row.problems:
            self._first_notes.setdefault((row.source, problem.check), (index, problem.text))
        record = {"item": row.item, "data": row.data or row.item or {}, "notes": row.problems}
        return (json.dumps(record, default=str) + "\n").encode()

    def _facts(self, row: Row) -> tuple[Any, ...]:
        item = row.item
        notes = Counter(problem.check for problem in row.problems)
        stops = (check for check in notes if check in STOPPED and (item is None or check != VOTES_ONCE))
        stop = STOPPED.get(next(stops, ""), WHOLE)
        if item is None and stop == WHOLE:
            stop = READINGS[-1]
        hashes: tuple[int, ...] = (0,) * 5  # of prompt, loose, chosen, rejected, rank
        split, words, half, turns, characters, roles = 0, (-1, -1), -1, -1, -1, -1
        if item is not None:
            hashes, split = self._hashes(item)
            half = int(may_train(item["prompt"])) if "judged_in" in item else -1
            named = "".join(message["role"][0] for message in item["prompt"])
            turns, roles = len(named), self.roles.setdefault(named, len(self.roles))
            responses = [len(text) for side in _RESPONSES if (text := item.get(side)) is not None]
            characters = sum(len(message["content"]) for message in item["prompt"]) + max(responses, default=0)
        if item is not None and "chosen" in item:
            words = len(words_of(item["chosen"])), len(words_of(item["rejected"]))
        margin = None if item is None else item.get("margin")
        first_wins = -1 if row.first_wins is None else int(row.first_wins)
        ballot, voted = tuple(row.ballot or (0, 0, 0)), row.ballot is not None
        return (
            self._code(row.number), bool(row.problems) or item is None, item is not None, READINGS.index(stop), roles,
            turns, characters, *(notes[check] for check in _COUNTED), notes["responses_differ"], _lead(row),
            _deciding(row), row.given_out, np.nan if margin is None else margin, notes[VOTES_ONCE], notes["desirable"],
            split, *hashes[:2], half, *hashes[2:], words, first_wins, ballot, voted,
            sum(is_model(name) for name, _ in row.cast),
        )  # fmt: skip

    def _hashes(self, item: CanonicalRow) -> tuple[tuple[int, ...], int]:
        key = prompt_key(item["prompt"])
        chosen: str = item.get("chosen") or item.get("response") or ""
        rejected: str = item.get("rejected") or ""
        rank = hash64(f"{self.seed} {key} {chosen} {rejected}") if self.ranked else 0
        hashes = hash64(key), hash64(loose_key(item["prompt"])), hash64(chosen), hash64(rejected), rank
        return hashes, SPLITS.index(split_of(key, self.split))

    def _code(self, number: int) -> int:
        """Row `number` of the file that is read now, as `place` takes it apart."""
        return len(self.files) - 1 << _FILE | number

    def place(self, code: int) -> tuple[str, int]:
        """The file of a row, by its field `row` of the facts, and the row's number there."""
        file, number = places(code)
        return self.files[file], number

    def named(self, code: int) -> str:
        """A row, by its field `row` of the facts, for a message."""
        file, number = self.place(int(code))
        return f"row {number} of {file}" if len(self.files) > 1 else f"row {number}"

    def of(self, file: str) -> NDArray[np.bool_]:
        """Which rows are of a file (n,)."""
        return places(self.facts["row"])[0] == (self.files.index(file) if file in self.files else -1)

    def note(self, index: int, problem: Problem) -> None:
        """Add a sentence that explains a measured value of a row. It does not judge the row."""
        self.late.setdefault(index, []).append(problem)

    def measure(self, column: str, index: NDArray[np.int64], values: Any) -> None:
        """Set `values` (m,) of a column at the rows `index` (m,)."""
        self.measured.setdefault(column, np.full(len(self.facts), np.nan, np.float32))[index] = values

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
        """The rows of the files, each once, that the pairs or other rows `which` (n,) were made of (see `place`)."""
        index, number = self.gathered.T
        made = np.zeros(len(self.facts), bool)
        made[which] = True
        return np.unique(np.concatenate([self.facts["row"][made], number[made[index]]]))

    def count(self, which: NDArray[np.bool_] | slice = slice(None)) -> int:
        """How many rows the files have (`which`: that those were made of); a ranking is one, whatever its pairs."""
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
        source = self.place(int(self.facts["row"][index]))[0]
        first, text = self._first_notes.get((source, check), (-1, ""))
        late = (problem.text for problem in self.late.get(index, ()) if problem.check == check)
        return text if first == index else next(late, None) or self._generic[check](index)

    def good(self) -> NDArray[np.bool_]:
        """Which rows nothing keeps out, so far (n,)."""
        return ~self.out

    def passes(self, check: str) -> NDArray[np.bool_]:
        """Which rows pass a check (n,)."""
        named = self.named_by.get(check)
        return np.ones(len(self.facts), bool) if named is None else ~named

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Index and line of every row, in order."""
        with self.path.open("rb") as lines:
            yield from enumerate(lines)

    def mixed_lines(self) -> Iterator[tuple[int, bytes]]:
        """The same, the files spread evenly over each other: the first rows hold each file in its share of all.

        Whoever takes so many first rows then takes them from all files. Row i of a file of n stands at (i + 1/2) / n.
        """
        file, _ = places(self.facts["row"])
        counts = np.bincount(file)
        order = np.lexsort((file, (np.arange(len(file)) - (np.cumsum(counts) - counts)[file] + 0.5) / counts[file]))
        with ExitStack() as files:
            lines = [files.enter_context(self.path.open("rb")) for _ in self.files]
            for each, start in zip(lines, self._starts, strict=True):
                each.seek(start)
            for index in order.tolist():
                yield index, lines[file[index]].readline()

    def items(self, wanted: NDArray[np.bool_], mixed: bool = False) -> Iterator[tuple[int, CanonicalRow]]:
        """Index and canonical form of the rows of `wanted` (n,), which are good ones, in order or as `mixed_lines`."""
        for index, line in self.mixed_lines() if mixed else self.lines():
            if wanted[index]:
                yield index, self.item_of(index, line)

    def item_of(self, index: int, line: bytes) -> CanonicalRow:
        """The canonical form of a good row, from its line."""
        row: Any = json.loads(line)
        item: CanonicalRow = row["item"] if self.facts["noted"][index] else row
        return item

    def quarantined(self) -> Iterator[tuple[int, bytes]]:
        """Index and quarantine record, a line each, of the rows that are kept out."""
        code = self.facts["row"].tolist()
        for index, line in self.lines():
            if self.out[index]:
                row = json.loads(line)
                noted = self.facts["noted"][index]
                notes = [Problem(*note) for note in row["notes"]] if noted else []
                problems = self._problems(index, [*notes, *self.late.get(index, ())])
                yield index, quarantine_line(*self.place(code[index]), problems, row["data"] if noted else row)

    def _problems(self, index: int, notes: list[Problem]) -> list[Problem]:
        """Why the row `index` is kept out: its notes on the checks that name it, then checks without a note."""
        checks = [check for check, named in self.named_by.items() if named[index]]
        said = [note for note in notes if note.check in checks]
        noted = {note.check for note in said}
        return [*said, *(Problem(check, self._generic[check](index)) for check in checks if check not in noted)]


def lead_of(ballot: Ballot) -> float:
    """The lead of the most frequent answer over the next, as a share of the votes; 0 if most say that neither is
    better, or two answers are as frequent."""
    _, second, first = sorted(ballot)
    return 0.0 if ballot.equal == first else (first - second) / sum(ballot)


def _lead(row: Row) -> float:
    if row.lead is not None:
        return row.lead
    if row.item is None:
        return 0.0 if any(problem.check == "decided" for problem in row.problems) else np.nan
    return np.nan if row.ballot is None else lead_of(row.ballot)


def _deciding(row: Row) -> int:
    return -1 if row.ballot is None or row.decided_otherwise else sum(row.ballot)


def places(codes: Any) -> tuple[Any, Any]:
    """The place in `Ledger.files` of a row's file, and the row's number there, by its field `row` of the facts; or
    arrays of them."""
    return codes >> _FILE, codes & (1 << _FILE) - 1


def _votes(named: list[tuple[int, int, int]]) -> NDArray[np.int32]:
    return np.array(named, np.int32).reshape(-1, 3)


def quarantine_line(source: str, number: int, problems: Iterable[Problem], data: Mapping[str, object]) -> bytes:
    """A row that was kept out, and why, as a line of JSON in ASCII: it may hold what UTF-8 can't."""
    reasons = [problem.text.encode("ascii", "backslashreplace").decode() for problem in problems]
    row = {"file": source, "row": number, "reasons": reasons, "data": data}
    # What JSON doesn't know (of a Parquet file: dates, bytes, NaN) becomes text.
    row = json.loads(json.dumps(row, default=str), parse_constant=str)
    return (json.dumps(row, sort_keys=True) + "\n").encode()
