"""Fields that several shapes of public preference data share: prompts, responses, the two sides, annotators."""

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

from components.data.formats.pairs import text_field
from components.data.formats.transcripts import ABOUT, SYSTEMS, as_messages, earlier_turns, instruction_of, split_answer
from components.data.rows import BadRow, Message, blank

Data = Mapping[str, Any]


class ReadingOptions(NamedTuple):
    """The config's options on labels and scores."""

    label_values: Mapping[str, str] = MappingProxyType({})
    """Maps a label's value to its meaning."""
    score: str | None = None
    """The score to compare; None for the format's default."""
    threshold: float = 0.0
    """A difference of scores above this makes a pair."""


class Shape(NamedTuple):
    """A public shape, and how to convert a row of it."""

    name: str
    format: str
    """The project's own format: `strings`, `votes`, `ranking` or `comparisons`."""
    fields: str
    """The fields that it reads, separated by commas."""
    has: Callable[[Data, ReadingOptions], bool]
    standard: Callable[[Data, ReadingOptions], dict[str, Any]]
    """Converts a row, without the fields `KEPT`."""


def voted_shape(
    name: str, required: str, more: str, standard: Callable[[Data, ReadingOptions], dict[str, Any]]
) -> Shape:
    """Return the shape of votes in rows that have all fields `required`, and perhaps `more` that are read."""
    names = set(required.split(","))
    return Shape(name, "votes", f"{required},{more}", lambda data, options: data.keys() >= names, standard)


KEPT = ("category", "source", "id", "judged_in")
LISTS = ("conversations", "messages")
PROMPTS = ("prompt", "instruction", "question", "query", "input", "context", "history")
_ASKED = ("instruction", "question", "query", "input")
"""Fields of prompts that `ABOUT` may follow."""
TWO = (
    ("output_1", "output_2"),
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_0", "response_1"),
    ("response_a", "response_b"),
)
TEXTS = ("completions", "candidates", "generations", "outputs", "answers")
"""Names of a list of responses to one prompt, besides `responses`."""
VERDICTS = ("label", "preference", "winner")
ONE_HOT = {"winner_model_a": "a", "winner_model_b": "b", "winner_tie": "tie"}
STRENGTHS = ("preference_strength", "overall_preference")
ANNOTATOR = re.compile(r"annotator_?\d+")
ARGILLA = re.compile(r".+\.responses(\.users|\.status)?\Z")
"""Columns with the votes of Argilla's records."""


PROMPT_FIELDS = ",".join((*PROMPTS, *LISTS, *SYSTEMS))
TWO_FIELDS = ",".join(chain(*TWO))


def prompt_fields(data: Data) -> list[str]:
    """Return the fields that make a row's prompt: one, or an instruction or question and what it is about."""
    names = ("instruction", *LISTS, *PROMPTS)
    first = next((name for name in names if data.get(name) is not None), "prompt")
    return [first, *(name for name in ABOUT if first in _ASKED and first != name and data.get(name))]


def prompt_of(data: Data) -> list[Message]:
    """Return a row's prompt, under any of the names in public data sets, after `system` and `history` turns."""
    name, *about = prompt_fields(data)
    if name == "instruction" or about:
        return earlier_turns(data, [{"role": "user", "content": instruction_of(data, name)}])
    prompt = as_messages(data.get(name), name)
    return prompt if name == "history" else earlier_turns(data, prompt)


def response_of(data: Data, name: str) -> str:
    """Return the response in field `name`: a text, or one message or a list of one, as in TRL and LLaMA-Factory."""
    if not isinstance(data.get(name), dict | list):
        return text_field(data, name)
    before, text = split_answer(data[name], name)
    if before:
        raise BadRow("turns_valid", f"`{name}` is not one message of the assistant")
    return text


def kept_fields(data: Data) -> dict[str, Any]:
    """Return the fields of a row that are copied unchanged."""
    return {name: data[name] for name in KEPT if name in data}


def sides_of(data: Data) -> tuple[str, str] | None:
    """Return the names of the two columns of responses; None if there are none."""
    return next((two for two in TWO if set(two) <= data.keys()), None)


def annotators_of(data: Data) -> list[str]:
    """Return the columns that each hold one annotator's vote."""
    return [name for name in data if ANNOTATOR.fullmatch(str(name))]


def votes_of_columns(data: Data, columns: Iterable[str]) -> list[dict[str, Any]]:
    """Return a vote for each of `columns` that has one; the column's name is the annotator's."""
    votes = ((name, data.get(name)) for name in columns)
    return [{"annotator": name, "label": vote} for name, vote in votes if vote is not None and not blank(str(vote))]
