"""Rows on their way through the contract: their texts on disk, of each a few numbers in memory.

What has to look at all rows (duplicates, leaks, agreement) looks at the numbers: 64-bit hashes of texts, of which two
differing ones agree by chance in 1 of 10 million sets of 1.6 million rows, counts and flags; about 110 bytes a row.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from components.base.errors import naming
from components.base.jsonl import json_line
from components.data.checks_config import ChecksConfig, RowChecks
from components.data.config import SplitConfig
from components.data.rows import CanonicalRow, Problem, Row
from components.data.splits import SPLITS, loose_key, prompt_key, split_of
from components.data.words import words_of
from components.human_eval.halves import may_train

ROW_CHECKS = tuple(RowChecks.model_fields)
VOTES_ONCE = "votes_once"
"""The check whose rows stay: their extra votes are left out instead."""
BIT = {name: np.uint32(1 << place) for place, name in enumerate(ROW_CHECKS)}

FACTS = np.dtype(
    [
        ("row", "i8"),  # its file and its number there (`Ledger.place`)
        ("failed", "u4"),  # bits of ROW_CHECKS
        ("out", "?"),  # kept out when it was read
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
    ]
)
_CHUNK = 20_000
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

    def __init__(self, path: Path, checks: ChecksConfig, split: SplitConfig, seed: int, ranked: bool = False) -> None:
        """`ranked`: whether rows will be chosen by `rank`."""
        self.path, self.split, self.seed, self.ranked = path, split, seed, ranked
        self.stay = {name for name in ROW_CHECKS if getattr(checks, name).severity == "warn"} | {VOTES_ONCE}
        self.facts: NDArray[Any] = np.empty(0, FACTS)
        self.votes: NDArray[np.int32] = np.empty((0, 3), np.int32)
        """Row index, annotator (place in `annotators`) and place in `Ballot` of each vote that names its annotator."""
        self.annotators: dict[str, int] = {}
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
        self._reasons: dict[str, dict[str, Reason]] = defaultdict(dict)
        """By file, and there by check."""
        self.late: dict[int, list[Problem]] = {}
        """What was found in the whole, by row index."""

    def fill(self, rows: Iterable[Row], progress: Callable[[int], None]) -> None:
        """Read all rows, writing each as a line: a good row's canonical JSON, a bad row's quarantine record.

        The rows of a file stand together.
        """
        parts, lines, votes, named, gathered, compared = [], [], [self.votes], [], [], []
        with naming(self.path), self.path.open("wb") as out:
            for index, row in enumerate(rows):
                if row.source not in self.files[-1:]:
                    self.files.append(row.source)
                    self._starts.append(out.tell())
                lines.append(self._facts(row))
                named += [(index, self.annotators.setdefault(a, len(self.annotators)), side) for a, side in row.votes]
                gathered += [(index, self._code(number)) for number in row.others]
                if row.models is not None:
                    one, other = (self.models.setdefault(model, len(self.models)) for model in row.models)
                    compared.append((index, one, other))
                out.write(self._line(row))
                if len(lines) == _CHUNK:
                    parts.append(np.array(lines, FACTS))
                    votes.append(_votes(named))
                    lines, named = [], []
                    progress(index + 1)
        self.facts = np.concatenate([*parts, np.array(lines, FACTS)])
        self.votes = np.concatenate([*votes, _votes(named)])
        self.compared = _votes(compared)
        self.gathered = np.array(gathered, np.int64).reshape(-1, 2)

    def _line(self, row: Row) -> bytes:
        if row.item is not None and not self._is_out(row):
            return json_line(row.item)
        for problem in row.problems:
            count_reason(self._reasons[row.source], self._code(row.number), problem)
        return quarantine_line(row.source, row.number, row.problems, row.data or row.item or {})

    def _is_out(self, row: Row) -> bool:
        return row.item is None or any(problem.check not in self.stay for problem in row.problems)

    def _facts(self, row: Row) -> tuple[Any, ...]:
        failed = 0
        for problem in row.problems:
            failed |= int(BIT[problem.check])
        item, out = row.item, self._is_out(row)
        hashes: tuple[int, ...] = (0,) * 5  # of prompt, loose, chosen, rejected, rank
        split, words, half = 0, (-1, -1), -1
        if item is not None and not out:
            hashes, split = self._hashes(item)
            half = int(may_train(item["prompt"])) if "judged_in" in item else -1
        elif item is not None:  # its votes count in agreement, whose intervals are clustered by prompt
            hashes = (hash64(prompt_key(item["prompt"])), *hashes[1:])
            if "judged_in" in item and not may_train(item["prompt"]):  # people judged it, though they decided nothing
                hashes, half = (hashes[0], hash64(loose_key(item["prompt"])), *hashes[2:]), 0
        if item is not None and "chosen" in item:
            words = len(words_of(item["chosen"])), len(words_of(item["rejected"]))
        first_wins = -1 if row.first_wins is None else int(row.first_wins)
        ballot, voted = tuple(row.ballot or (0, 0, 0)), row.ballot is not None
        texts = *hashes[:2], half, *hashes[2:]
        return (self._code(row.number), failed, out, split, *texts, words, first_wins, ballot, voted)

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

    def fail(self, index: int, problem: Problem) -> None:
        """Note a problem that only the whole shows."""
        self.late.setdefault(index, []).append(problem)
        self.facts["failed"][index] |= BIT[problem.check]

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
        for each in self.files if file is None else [file]:
            for check, reason in self._reasons[each].items():
                known = found.get(check, reason._replace(rows=0))
                found[check] = known._replace(rows=known.rows + reason.rows, last=reason.last)
        for index, problems in sorted(self.late.items()):
            code = int(self.facts["row"][index])
            for problem in problems:
                if problem.check not in self.stay and file in (None, self.place(code)[0]):
                    count_reason(found, code, problem)
        return found

    def good(self) -> NDArray[np.bool_]:
        """Which rows nothing keeps out, so far (n,)."""
        keep_out = np.bitwise_or.reduce([bit for name, bit in BIT.items() if name not in self.stay])
        return ~self.facts["out"] & (self.facts["failed"] & keep_out == 0)

    def passes(self, check: str) -> NDArray[np.bool_]:
        """Which rows pass a check (n,)."""
        return self.facts["failed"] & BIT[check] == 0

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
                yield index, json.loads(line)

    def quarantined(self) -> Iterator[tuple[int, bytes]]:
        """Index and quarantine record, a line each, of the rows that are kept out."""
        good, code = self.good(), self.facts["row"].tolist()
        for index, line in self.lines():
            if self.facts["out"][index]:
                yield index, line
            elif not good[index]:
                yield index, quarantine_line(*self.place(code[index]), self.late[index], json.loads(line))


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
