"""What is measured of a row by itself: numbers that the contract judges, beside its texts, in shards on disk."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from components.base.jsonl import json_line
from components.data.config import SplitConfig
from components.data.rows import Ballot, CanonicalRow, Row, is_model
from components.data.splits import SPLITS, loose_key, prompt_key, split_of
from components.data.words import words_of
from components.human_eval.batch.halves import may_train
from data_contracts.rows.shards import write_shard

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
_RESPONSES: tuple[Literal["chosen", "rejected", "response"], ...] = ("chosen", "rejected", "response")
_FILE = 40
"""Bits for a row's number in its file; those above say which file."""


def hash64(*parts: str) -> int:
    """Return the first 8 bytes of the sha256 of texts (lone surrogates allowed)."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()[:8], "big")


def lead_of(ballot: Ballot) -> float:
    """Return the lead of the most frequent answer over the next, as a share of the votes; 0 if most say that neither is
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
    """Return the place in `Ledger.files` of a row's file, and the row's number there, by its field `row` of the facts;
    or arrays of them."""
    return codes >> _FILE, codes & (1 << _FILE) - 1


class Measuring(NamedTuple):
    """How rows are measured."""

    split: SplitConfig
    seed: int
    ranked: bool = False
    """Whether rows will be chosen by `rank`."""
    extra: tuple[str, ...] = ()
    """Further columns of the source to keep."""


class ShardNotes(NamedTuple):
    """What a shard says of its rows beside their facts. Codes are places in its own lists."""

    file: str
    """What the rows call their file; all are of one."""
    roles: list[str]
    """Roles of the turns of a prompt, a letter each."""
    annotators: list[str]
    models: list[str]
    """Models whose responses votes compare."""
    model_votes: dict[str, int]
    """Votes of each model, by the name of its annotator."""
    first: dict[str, tuple[int, str]]
    """By check, the place and the text of its first note."""
    kinds: dict[str, list[bool]]
    """By further column: whether any value is known, all known are truth values, and all can be read as numbers."""


VOTES, GATHERED, COMPARED = ("votes", np.int32, 3), ("gathered", np.int64, 2), ("compared", np.int32, 3)
"""Arrays beside the rows: row, annotator and place in `Ballot` of each vote that names its annotator; row, and number
of a further row of the source that it was gathered from; row and the models of its two responses."""


class _Codes(dict[str, int]):
    """Names by their place, in the order in which they are met."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def write_rows(path: Path, rows: Iterable[Row], file: int, how: Measuring) -> None:
    """Measure `rows`, which are of one file, the `file`th, and write their shard: facts, and each row as a line, its
    canonical JSON or a record of it, its source fields and notes."""
    roles, annotators, models = _Codes(), _Codes(), _Codes()
    facts: list[tuple[Any, ...]] = []
    lines: list[bytes] = []
    votes: list[tuple[int, int, int]] = []
    gathered: list[tuple[int, int]] = []
    compared: list[tuple[int, int, int]] = []
    extra: list[list[Any]] = []
    model_votes: Counter[str] = Counter()
    first: dict[str, tuple[int, str]] = {}
    source = ""
    for index, row in enumerate(rows):
        source = row.source
        facts.append(_facts(row, file, how, roles))
        votes += [(index, annotators[name], side) for name, side in row.votes]
        model_votes.update(name for name, _ in row.cast if name is not None and is_model(name))
        gathered += [(index, code_of(file, number)) for number in row.others]
        if row.models is not None:
            compared.append((index, models[row.models[0]], models[row.models[1]]))
        if how.extra:
            extra.append([_further(row.extra.get(name)) for name in how.extra])
        for problem in row.problems:
            first.setdefault(problem.check, (index, problem.text))
        lines.append(_line(row))
    table = np.array(facts, FACTS)
    columns: dict[str, Any] = {name: table[name] for name in FACTS.names or ()} | {"line": lines}
    if how.extra:
        columns["extra"] = [json.dumps(values).encode() for values in extra]
    kinds = {name: kind_of([values[place] for values in extra]) for place, name in enumerate(how.extra)}
    notes = ShardNotes(source, list(roles), list(annotators), list(models), model_votes, first, kinds)
    arrays = {
        name: np.array(found, dtype).reshape(-1, width)
        for (name, dtype, width), found in ((VOTES, votes), (GATHERED, gathered), (COMPARED, compared))
    }
    write_shard(path, columns, notes._asdict(), arrays)


def _line(row: Row) -> bytes:
    if row.item is not None and not row.problems:
        return json_line(row.item)
    record = {"item": row.item, "data": row.data or row.item or {}, "notes": row.problems}
    return (json.dumps(record, default=str) + "\n").encode()


def _further(value: Any) -> Any:
    """Return a value of a further column as JSON: nothing is expected of what is inside lists and objects."""
    if isinstance(value, list | dict):
        return type(value).__name__
    if isinstance(value, Decimal | np.number):
        return float(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def kind_of(values: list[Any]) -> list[bool]:
    """Of values of a further column, what `ShardNotes.kinds` says."""
    import pandas as pd  # the start of each run imports this module

    known = [value for value in values if value is not None]
    try:
        pd.to_numeric(pd.Series(values, dtype=object), errors="raise").astype(float)
        numbers = True
    except (TypeError, ValueError, OverflowError):
        numbers = False
    return [bool(known), all(isinstance(value, bool) for value in known), numbers]


def _facts(row: Row, file: int, how: Measuring, roles_of: _Codes) -> tuple[Any, ...]:
    item = row.item
    notes = Counter(problem.check for problem in row.problems)
    stops = (check for check in notes if check in STOPPED and (item is None or check != VOTES_ONCE))
    stop = STOPPED.get(next(stops, ""), WHOLE)
    if item is None and stop == WHOLE:
        stop = READINGS[-1]
    hashes: tuple[int, ...] = (0,) * 5  # of prompt, loose, chosen, rejected, rank
    split, words, half, turns, characters, roles = 0, (-1, -1), -1, -1, -1, -1
    if item is not None:
        hashes, split = _hashes(item, how)
        half = int(may_train(item["prompt"])) if "judged_in" in item else -1
        named = "".join(message["role"][0] for message in item["prompt"])
        turns, roles = len(named), roles_of[named]
        responses = [len(text) for side in _RESPONSES if (text := item.get(side)) is not None]
        characters = sum(len(message["content"]) for message in item["prompt"]) + max(responses, default=0)
    if item is not None and "chosen" in item:
        words = len(words_of(item["chosen"])), len(words_of(item["rejected"]))
    margin = None if item is None else item.get("margin")
    first_wins = -1 if row.first_wins is None else int(row.first_wins)
    ballot, voted = tuple(row.ballot or (0, 0, 0)), row.ballot is not None
    return (
        code_of(file, row.number), bool(row.problems) or item is None, item is not None, READINGS.index(stop), roles,
        turns, characters, *(notes[check] for check in _COUNTED), notes["responses_differ"], _lead(row),
        _deciding(row), row.given_out, np.nan if margin is None else margin, notes[VOTES_ONCE], notes["desirable"],
        split, *hashes[:2], half, *hashes[2:], words, first_wins, ballot, voted,
        sum(is_model(name) for name, _ in row.cast),
    )  # fmt: skip


def _hashes(item: CanonicalRow, how: Measuring) -> tuple[tuple[int, ...], int]:
    key = prompt_key(item["prompt"])
    chosen: str = item.get("chosen") or item.get("response") or ""
    rejected: str = item.get("rejected") or ""
    rank = hash64(f"{how.seed} {key} {chosen} {rejected}") if how.ranked else 0
    hashes = hash64(key), hash64(loose_key(item["prompt"])), hash64(chosen), hash64(rejected), rank
    return hashes, SPLITS.index(split_of(key, how.split))


def code_of(file: int, number: int) -> int:
    """Row `number` of the `file`th file, as `places` takes it apart."""
    return file << _FILE | number
