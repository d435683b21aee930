"""Read suites of judged pairs in their published formats: RewardBench, LLMBar, MT-Bench, and Tether's own.

pairs      `prompt`, `chosen`, `rejected` (RewardBench), or another format of `components/data/formats/pairs.py`
LLMBar     `input`, `output_1`, `output_2`, `label` (1 or 2: the better output)
MT-Bench   `conversation_a`, `conversation_b`, `winner` (model_a, model_b, or a tie) and `turn`: the answer of that turn
           is judged, and each side keeps its own conversation before it

The subset of a row is its `subset`, else its `category`, else its turn (MT-Bench), else `all`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.text import counted
from components.data.formats.pairs import detect, parse_pair
from components.data.formats.transcripts import as_messages
from components.data.readers import read_source
from components.data.rows import BadRow, Message, RawRow

SUITES = "suites"
"""Prefix of the reward stage's inputs that are suites: `suites/NAME`."""
ALL = "all"
_LLMBAR, _MT_BENCH = {"input", "output_1", "output_2", "label"}, {"conversation_a", "conversation_b", "winner"}
_LONGEST = 1_000_000
_LOOKED_AT = 100


class SuitePair(NamedTuple):
    """A judged pair: each side a conversation that ends with the response."""

    chosen: list[Message]
    rejected: list[Message]
    subset: str
    cluster: str
    """Its first question, by which intervals are clustered."""


class SuitePairs(NamedTuple):
    """The judged pairs of a file."""

    shape: str
    pairs: list[SuitePair]
    ties: int
    """Number of rows without a winner, which are left out."""


def read_suite(path: Path) -> SuitePairs:
    """Read a suite (JSON, JSON Lines, CSV or Parquet, also gzipped).

    Raises:
        UserError: the file has none of these formats, a row is invalid (the message names it), or no row has a winner.
    """
    rows = list(read_source(path))
    fields = set().union(*(row.data.keys() for row in rows[:_LOOKED_AT]))
    shape = "LLMBar" if fields >= _LLMBAR else "MT-Bench" if fields >= _MT_BENCH else "pairs"
    layout = detect(rows[:_LOOKED_AT], path) if shape == "pairs" else ""
    pairs, ties = [], 0
    for row in rows:
        try:
            pair = _pair(row, shape, layout)
        except BadRow as bad:
            raise UserError(f"{path}, row {row.number}: {bad}. Correct the row or take it out.") from bad
        if pair is None:
            ties += 1
        else:
            pairs.append(pair)
    if not pairs:
        raise UserError(f"{path}: {counted(len(rows), 'row')}, and all are ties, so there is nothing to evaluate on.")
    return SuitePairs(shape, pairs, ties)


def _pair(row: RawRow, shape: str, layout: str) -> SuitePair | None:
    """Return the pair of a row; None for a tie. Raises BadRow."""
    if row.problem:
        raise BadRow(*row.problem)
    if shape == "LLMBar":
        return _llmbar(row.data)
    if shape == "MT-Bench":
        return _mt_bench(row.data)
    read = parse_pair(row, layout, "", _LONGEST)
    if any(problem.check == "decided" for problem in read.problems):
        return None
    if read.item is None or read.problems:
        raise BadRow(*read.problems[0])
    prompt = read.item["prompt"]
    chosen, rejected = [*prompt, _answer(read.item["chosen"])], [*prompt, _answer(read.item["rejected"])]
    return SuitePair(chosen, rejected, _subset(row.data), _question(prompt))


def _llmbar(data: Mapping[str, object]) -> SuitePair:
    texts = [data["input"], data["output_1"], data["output_2"]]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise BadRow("fields_present", "`input`, `output_1` and `output_2` have to be texts")
    if str(data["label"]) not in ("1", "2"):
        raise BadRow("votes_valid", f"`label` is {data['label']!r}, and has to be 1 or 2, the better output")
    prompt: list[Message] = [{"role": "user", "content": str(texts[0])}]
    first, second = ([*prompt, _answer(str(text))] for text in texts[1:])
    better, worse = (first, second) if str(data["label"]) == "1" else (second, first)
    return SuitePair(better, worse, _subset(data), _question(prompt))


def _mt_bench(data: Mapping[str, object]) -> SuitePair | None:
    winner = str(data["winner"])
    if winner.startswith("tie"):
        return None
    if winner not in ("model_a", "model_b"):
        raise BadRow("votes_valid", f"`winner` is {winner!r}, and has to be model_a, model_b or a tie")
    turn = data.get("turn", 1)
    if not isinstance(turn, int) or isinstance(turn, bool) or turn < 1:
        raise BadRow("fields_present", f"`turn` is {turn!r}, and has to be 1 or more")
    sides = {}
    for side in ("a", "b"):
        name = f"conversation_{side}"
        messages = as_messages(data[name], name)[: 2 * turn]
        if len(messages) < 2 * turn or messages[-1]["role"] != "assistant":
            raise BadRow("turns_valid", f"`{name}` has no answer in turn {turn}")
        sides[side] = messages
    better, worse = ("a", "b") if winner == "model_a" else ("b", "a")
    return SuitePair(sides[better], sides[worse], _subset(data, f"turn {turn}"), _question(sides["a"]))


def _subset(data: Mapping[str, object], default: str = ALL) -> str:
    named = data.get("subset") or data.get("category")
    return str(named) if named else default


def _answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _question(messages: list[Message]) -> str:
    return next((message["content"] for message in messages if message["role"] == "user"), "")
