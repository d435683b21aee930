"""Measure each row by itself: numbers for the contract, stored with the row's texts in shards on disk."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson
from numpy.typing import NDArray

from components.data.checks_config import STOPPED
from components.data.config import SplitConfig
from components.data.rows import Ballot, CanonicalRow, Row, is_model
from components.data.splits import SPLITS, loose_key, prompt_key, split_of
from components.data.words import seen, words_of
from components.human_eval.batch.halves import may_train
from data_contracts.rows.shards import write_shard

VOTES_ONCE = "votes_once"
"""The check whose failing rows are kept; only their repeated votes are ignored."""
WHOLE = "whole"
"""The value of the column `reading` for a completely read row."""
READINGS = (WHOLE, *STOPPED.values(), "undecided")
"""Every value of the column `reading`. An undecided row has no chosen and rejected response."""

PHASES = ("read", "compared", "texts")
"""The phases, in order."""
PAIRS, DEMONSTRATIONS, PROMPTS = "preferences", "demonstrations", "prompts"
_EVERY = (PAIRS, DEMONSTRATIONS, PROMPTS)


class Column(NamedTuple):
    """A measured column. Those of the phase `read` are facts of that name; the others come from comparing rows or from
    texts (`Ledger.measured`)."""

    phase: str
    meaning: str
    kinds: tuple[str, ...] = _EVERY
    """The kinds of data that have it."""
    tokens: bool = False
    """Whether it needs a run's tokenizer."""
    dtype: str = "f4"
    """The type of the fact: a code of a name, if it is an integer."""


COLUMNS: dict[str, Column] = {
    "reading": Column("read", f"how far the row was read: {', '.join(READINGS)}", dtype="i1"),
    "roles": Column("read", "roles of the prompt's turns, a letter each (sua: system, user, assistant)", dtype="i4"),
    "turns": Column("read", "turns of the prompt, a system message among them"),
    "characters": Column("read", "characters of the prompt and of the longer response"),
    "empty_texts": Column("read", "turns and responses in which a reader sees nothing"),
    "unclean_texts": Column("read", "texts with a control or replacement character"),
    "marked_texts": Column("read", "turns and responses with a marker of a chat template"),
    "placeholder_responses": Column("read", "responses that are a missing value or an error written as text",
                                    (PAIRS, DEMONSTRATIONS)),
    "distinct_responses": Column("read", "distinct responses, 1 or 2", (PAIRS,)),
    "chosen_words": Column("read", "words of the chosen response (characters of scripts without spaces)", (PAIRS,)),
    "rejected_words": Column("read", "words of the rejected response", (PAIRS,)),
    "votes": Column("read", "votes on the pair", (PAIRS,)),
    "votes_for_neither": Column("read", "votes that say neither response is better", (PAIRS,)),
    "lead": Column("read", "lead of the most frequent answer over the next, a share of the votes; 0 is a tie",
                   (PAIRS,), dtype="f8"),
    "deciding_votes": Column("read", "votes that decide the pair; missing where experts or data.labels decide",
                             (PAIRS,)),
    "given_out": Column("read", "1 where Tether gave the pair out to label", (PAIRS,)),
    "repeated_votes": Column("read", "1 where an annotator voted twice on the pair", (PAIRS,)),
    "margin": Column("read", "how much better the chosen response is, in the source's units", (PAIRS,), dtype="f8"),
    "desirable": Column("read", "1 or 0 as a label says; 0 where nothing is to be learned", (DEMONSTRATIONS,)),
    "split": Column("read", f"{', '.join(SPLITS)}: by the prompt's own words", dtype="i1"),
    "copies_before": Column("compared", "1 where an earlier row has the same prompt and responses"),
    "contradictions": Column("compared", "1 where a row judges the same texts the other way", (PAIRS, DEMONSTRATIONS)),
    "near_copies_before": Column("texts", "1 where an earlier row is nearly the same (data.near_duplicate)"),
    "contaminated": Column("texts", "1 where the prompt nearly repeats one of data.decontaminate"),
    "held_out_before": Column("texts", "1 where a row for training nearly repeats a held-out prompt of data.reference"),
    "language": Column("texts", "likeliest language of the responses (ISO 639-1)"),
    "special_texts": Column("texts", "turns and responses with a special token of the tokenizer", tokens=True),
    "template": Column("texts", "0: the chat template renders the row unchanged, 1: it refuses it, 2: it changes it",
                       tokens=True),
    "distinct_cut_responses": Column("texts", "distinct responses once cut to generation.max_new_tokens", (PAIRS,),
                                     tokens=True),
    "prompt_tokens": Column("texts", "tokens of the prompt in the chat template", tokens=True),
    "response_tokens": Column("texts", "tokens of the longer response, EOS included", (PAIRS, DEMONSTRATIONS),
                              tokens=True),
    "chosen_tokens": Column("texts", "tokens of the chosen response", (PAIRS,), tokens=True),
    "rejected_tokens": Column("texts", "tokens of the rejected response", (PAIRS,), tokens=True),
}  # fmt: skip
"""Every measured column, by name. A number is NaN where a row lacks it."""
FACTS = np.dtype(
    [
        ("row", "i8"),  # code of its file and its number there (`Ledger.place`)
        ("noted", "?"),  # its line is a record of item, source fields and notes; otherwise only the item (`item_in`)
        ("made", "?"),  # it has a canonical form
        ("prompt", "u8"),  # 0 if the row could not be read
        ("loose", "u8"),  # hash of the prompt, ignoring case, punctuation and white space
        ("half", "i1"),  # 1: a prompt judged in a batch, may train; 0: likewise, only evaluates; -1: others
        ("chosen", "u8"),
        ("rejected", "u8"),
        ("rank", "u8"),  # the order in which max_pairs selects
        ("words", "i4", (2,)),  # word counts (`words_of`) of the chosen and the rejected response; -1 if there is none
        ("first_wins", "i1"),  # -1 if the format has no order
        ("ballot", "i4", (3,)),  # votes for the first, the second, neither
        ("voted", "?"),
        ("of_models", "i4"),  # votes that models cast
        *((name, column.dtype) for name, column in COLUMNS.items() if column.phase == "read"),
    ]
)
_COUNTED = {
    "empty_texts": "texts_filled", "unclean_texts": "text_clean", "marked_texts": "no_markers",
    "placeholder_responses": "no_placeholder", "repeated_votes": VOTES_ONCE,
}  # fmt: skip
"""Maps columns to the check whose notes they count."""
Side = Literal["chosen", "rejected", "response"]
RESPONSES: tuple[Side, ...] = ("chosen", "rejected", "response")
_FILE = 40
"""Number of low bits that hold a row's number in its file; the higher bits hold the file."""


def hash64(*parts: str) -> int:
    """Return the first 8 bytes of the sha256 of texts, which may contain lone surrogates."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).digest()[:8], "big")


def lead_of(ballot: Ballot) -> float:
    """Return the lead of the most frequent answer over the next, as a share of votes; 0 if most votes are for neither
    or two answers tie."""
    _, second, first = sorted(ballot)
    return 0.0 if ballot.equal == first else (first - second) / sum(ballot)


def _lead(row: Row) -> float:
    if row.lead is not None:
        return row.lead
    if row.item is None:
        return 0.0 if any(problem.check == "decided" for problem in row.problems) else np.nan
    return np.nan if row.ballot is None else lead_of(row.ballot)


def places(codes: Any) -> tuple[Any, Any]:
    """Return the index of a row's file in `Ledger.files` and the row's number there, from the facts' field `row`; also
    for arrays."""
    return codes >> _FILE, codes & (1 << _FILE) - 1


def longer_wins(words: NDArray[Any]) -> NDArray[np.float64]:
    """Return for word counts (n, 2) of chosen and rejected: 1 if the chosen response has more words, 0 if fewer, NaN if
    equal; (n,)."""
    chosen, rejected = words[:, 0], words[:, 1]
    return np.where(chosen == rejected, np.nan, (chosen > rejected).astype(float))


def length_preference(words: NDArray[Any]) -> float | None:
    """Return the share of pairs in which the longer response wins, leaving out pairs of equal length; None if no pair
    is left."""
    wins = longer_wins(words)
    return None if np.isnan(wins).all() else float(np.nanmean(wins))


class Measuring(NamedTuple):
    """Settings for measuring rows."""

    split: SplitConfig
    seed: int
    ranked: bool = False
    """Whether rows will be chosen by `rank`."""
    extra: tuple[str, ...] = ()
    """Other columns of the source to keep."""


class ShardNotes(NamedTuple):
    """Notes of a shard about its rows, in addition to their facts. Codes are indices in its own lists."""

    file: str
    """The rows' label of their file; a shard has rows of one file only."""
    roles: list[str]
    """Distinct roles of prompts' messages, a letter each."""
    annotators: list[str]
    models: list[str]
    """Models whose responses are compared."""
    model_votes: dict[str, int]
    """Number of votes of each model, by annotator name."""


class _Codes(dict[str, int]):
    """Assigns each name a code, in order of first use."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def write_rows(path: Path, rows: Iterable[Row], file: int, how: Measuring) -> None:
    """Measure `rows`, which come from the file with index `file`, and write their shard: facts, and each row as a line,
    which is its canonical JSON or a record with its source fields and notes."""
    roles, annotators, models = _Codes(), _Codes(), _Codes()
    facts: list[tuple[Any, ...]] = []
    lines: list[bytes] = []
    lists: dict[str, list[list[int]]] = {"annotators": [], "sides": [], "gathered": [], "models": []}
    extra: list[list[Any]] = []
    model_votes: Counter[str] = Counter()
    source = ""
    for row in rows:
        source = row.source
        line, noted = _line(row)
        lines.append(line)
        facts.append(_facts(row, noted, file, how, roles))
        lists["annotators"].append([annotators[name] for name, _ in row.votes])
        lists["sides"].append([side for _, side in row.votes])
        lists["gathered"].append([code_of(file, number) for number in row.raw.others])
        lists["models"].append([models[name] for name in row.models or ()])
        model_votes.update(name for name, _ in row.cast if name is not None and is_model(name))
        if how.extra:
            extra.append([_further(row.raw.extra.get(name)) for name in how.extra])
    table = np.array(facts, FACTS)
    columns: dict[str, Any] = {name: table[name] for name in FACTS.names or ()} | {"line": lines} | lists
    if how.extra:
        columns["extra"] = [json.dumps(values).encode() for values in extra]
    notes = ShardNotes(source, list(roles), list(annotators), list(models), model_votes)
    write_shard(path, columns, notes._asdict())


def _line(row: Row) -> tuple[bytes, bool]:
    """Return a row's line, and whether it is a record."""
    if row.item is not None and not row.problems:
        with suppress(orjson.JSONEncodeError):  # a column may have an integer of over 64 bits
            return orjson.dumps(row.item, option=orjson.OPT_SORT_KEYS), False
    record = {"item": row.item, "data": row.data or row.item or {}, "notes": row.problems}
    return json.dumps(record, default=str).encode(), True


def item_in(line: bytes, noted: bool) -> CanonicalRow:
    """Return the canonical form of a row from its line; `noted` is the row's fact."""
    item: CanonicalRow = json.loads(line)["item"] if noted else orjson.loads(line)
    return item


def _further(value: Any) -> Any:
    """Return a value of an extra column as JSON; lists and objects are not inspected."""
    if isinstance(value, list | dict):
        return type(value).__name__
    if isinstance(value, Decimal | np.number):
        return float(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _facts(row: Row, noted: bool, file: int, how: Measuring, roles_of: _Codes) -> tuple[Any, ...]:
    """Return the facts of a row, in the order of `FACTS`."""
    notes, ballot = Counter(problem.check for problem in row.problems), row.ballot
    facts = {
        "row": code_of(file, row.number), "noted": noted, "made": row.item is not None, "half": -1, "words": (-1, -1),
        "reading": READINGS.index(_reading(row, notes)), "roles": -1, "lead": _lead(row),
        "first_wins": -1 if row.first_wins is None else int(row.first_wins),
        "ballot": tuple(ballot or (0, 0, 0)), "voted": ballot is not None,
        "of_models": sum(is_model(name) for name, _ in row.cast), "desirable": 0 if notes["desirable"] else np.nan,
    }  # fmt: skip
    if ballot is not None:
        facts |= {"votes": sum(ballot), "votes_for_neither": ballot.equal}
        facts |= {} if row.decided_otherwise else {"deciding_votes": sum(ballot)}
    if row.item is not None:
        facts |= {column: notes[check] for column, check in _COUNTED.items()}
        facts |= {"distinct_responses": 2 - notes["responses_differ"]}
        facts |= {"given_out": row.given_out, **_of_item(row.item, how, roles_of)}
    return tuple(facts.get(name, missing) for name, missing in _MISSING.items())


_MISSING = {name: np.nan if FACTS[name].kind == "f" else 0 for name in FACTS.names or ()}


def _reading(row: Row, notes: Iterable[str]) -> str:
    """Return how far a row was read, a value of the column `reading`."""
    stops = (check for check in notes if check in STOPPED and (row.item is None or check != VOTES_ONCE))
    return STOPPED.get(next(stops, ""), WHOLE if row.item is not None else READINGS[-1])


def _of_item(item: CanonicalRow, how: Measuring, roles_of: _Codes) -> dict[str, Any]:
    key, roles = prompt_key(item["prompt"]), "".join(message["role"][0] for message in item["prompt"])
    longest = max((len(text) for side in RESPONSES if (text := item.get(side)) is not None), default=0)
    chosen = seen(item.get("chosen") or item.get("response") or "")
    rejected = seen(item.get("rejected") or "")
    if item.get("desirable") is False:  # it contradicts a label that says the opposite, as a pair does
        chosen, rejected = rejected, chosen
    facts: dict[str, Any] = {
        "prompt": hash64(key), "loose": hash64(loose_key(item["prompt"])),
        "split": SPLITS.index(split_of(key, how.split)),
        "chosen": hash64(chosen), "rejected": hash64(rejected), "turns": len(roles), "roles": roles_of[roles],
        "rank": hash64(f"{how.seed} {key} {chosen} {rejected}") if how.ranked else 0,
        "desirable": item.get("desirable", np.nan),
        "characters": sum(len(message["content"]) for message in item["prompt"]) + longest,
    }  # fmt: skip
    if "judged_in" in item:
        facts["half"] = int(may_train(item["prompt"]))
    if (margin := item.get("margin")) is not None:
        facts["margin"] = margin
    if "chosen" in item:
        facts["words"] = words = len(words_of(item["chosen"])), len(words_of(item["rejected"]))
        facts["chosen_words"], facts["rejected_words"] = words
    return facts


def code_of(file: int, number: int) -> int:
    """Return the code of row `number` in the file with index `file`; `places` is the inverse."""
    return file << _FILE | number
