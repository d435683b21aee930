"""Rows between source and split: the raw row, its canonical form, and its problems."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Annotated, NamedTuple, Required

from pydantic import AfterValidator, ConfigDict, Field, JsonValue, StringConstraints, with_config
from typing_extensions import TypedDict  # pydantic takes typing's only from Python 3.12 on

from components.base.errors import UserError
from components.base.jsonl import Message
from components.base.text import counted
from components.data.words import seen

Text = Annotated[str, StringConstraints(min_length=1)]


def _turn(message: Message) -> Message:
    if message.keys() != {"role", "content"} or not message["content"]:
        raise ValueError("expected an object with role and content")
    if message["role"] not in ("system", "user", "assistant"):
        raise ValueError(f"has role {message['role']!r}, expected user, assistant or system")
    return message


@with_config(ConfigDict(strict=True, extra="forbid"))
class CanonicalRow(TypedDict, total=False):
    """A row after validation. A pair has all fields except `response`; a demonstration has `response` but no field that
    only pairs have; a prompt has neither."""

    # long: a record on disk, of three kinds of rows
    prompt: Required[Annotated[list[Annotated[Message, AfterValidator(_turn)]], Field(min_length=1)]]
    response: Text
    """The response of a demonstration."""
    desirable: bool
    """Whether the single label (KTO) of a demonstration says that its response is desirable; absent without a label."""
    chosen: Text
    rejected: Text
    margin: Annotated[float | None, Field(allow_inf_nan=False)]
    """How much better the chosen response is, in the source's units."""
    votes_chosen: Annotated[int | None, Field(ge=0)]
    """Annotators who preferred `chosen`."""
    votes: Annotated[int | None, Field(ge=1)]
    """Annotators who voted, including votes for neither."""
    votes_of_models: Annotated[int, Field(ge=1)]
    """How many of `votes` were cast by models (`is_model`); absent if people cast all."""
    soft_label: Annotated[float | None, Field(ge=0.5, le=1, allow_inf_nan=False)]
    """Share of the votes for `chosen`, with a vote for neither as 1/2: a target for the reward loss."""
    objectives: dict[Text, Annotated[float, Field(ge=0, le=1)]] | None
    """Share of the votes for `chosen` on single questions, by name."""
    overlong: bool
    """For a pair in a split: whether a response exceeds `generation.max_new_tokens` and so is cut, without EOS. Absent
    if none does."""
    weight: Annotated[float, Field(gt=0, le=1)]
    """The pair's weight: the weights of the kept pairs of one ranking sum to 1."""
    source_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    """For a pair in a split: what `data.sources` multiplies its training loss by, scaled so that the mean over the kept
    training rows is 1. Absent if no source has a weight."""
    category: Text | None
    """Stratum of the prompt."""
    columns: dict[Text, JsonValue]
    """For a pair or a prompt, the columns that `data.reward_columns` names; absent if it names none."""
    judged_in: Text
    """The batch of a run in which people judged the pair; absent in all other rows."""
    source: Text
    """The source that the row itself names, else the input from which it came."""
    row: Annotated[int, Field(ge=1)]
    """Its 1-based number there."""


# C0 controls except tab, line feed and carriage return; delete; C1; lone surrogates (from invalid UTF-8); and the
# replacement character, which a decoder writes for invalid bytes
_UNCLEAN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffd]")
_REPLACED = ascii("\ufffd")
# White space and invisible characters: soft hyphens, zero-width and bidirectional marks, fillers, tags, byte-order
# marks
_INVISIBLE = re.compile(
    r"[\s\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff"
    r"\u115f\u1160\u2800\u3164\uffa0\U000e0000-\U000e007f]*"
)
_MARKERS = re.compile(
    r"<[|\uff5c][\w\u2581]{2,40}[|\uff5c]>|<(?:bos|eos)>|</?s>|\[/?INST\]|<</?SYS>>|<(?:start|end)_of_turn>"
    r"|\n\n(?:Human|Assistant):|### (?:Instruction|Response|Human|Assistant):"
)
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*(['"])(?:role|content|from|value)\1\s*:.*\}\s*\]\s*\Z""", re.DOTALL)
"""A list of messages as JSON or as Python prints it."""
_PLACEHOLDER = re.compile(
    r"(?i:nan|none|null|n/a|<na>|[<(](?:null|nil)[>)]|undefined|\[(?:deleted|removed)(?: by \w+)?\]|\[object object\])"
    r"|NA|NaT|nil|\\N|ERROR|#(?:N/A|NAME\?|(?:VALUE|REF|DIV/0|NULL|NUM|ERROR|SPILL|CALC|FIELD|BUSY)!)|Err:\d{3}"
    r"|(?i:(?:[\w.]*error|[\w.]*exception|error code|http error)\b[\s\d]*:).{0,500}"
    r"|Traceback \(most recent call last\):(?s:.*)"
    r"|(?:HTTP(?:/[\d.]+)? )?[45]\d\d (?:Bad (?:Request|Gateway)|Unauthorized|Forbidden|Not Found|Too Many Requests"
    r"|(?:Internal )?Server Error|Service (?:Temporarily )?Unavailable|(?:Request|Gateway) Time-?[Oo]ut)\.?"
    r"|(?i:(?:rate limit|request timed out|connection (?:error|refused|reset|timed out)|internal server error"
    r"|bad gateway|service unavailable|gateway time-?out|too many requests|insufficient_quota)"
    r"(?:\Z|[.!:;,(]| (?:reached|exceeded|hit|for|by|after|while|error|try|please)\b)).{0,200}"
    r"""|\{\s*(['"])(?:error|errors|error_code|error_message|errorMessage)\1\s*:(?s:.*)\}"""
    r"""|\{\s*(['"])(?:object|type|status)\2\s*:\s*(['"])error\3(?s:.*)\}"""
)
"""A response that is not one: what pandas, JavaScript, a spreadsheet or Reddit writes where nothing is, and errors."""
_LABEL = re.compile(rf"{_INVISIBLE.pattern}(?:Human|Assistant):")


OF_MODEL = "model:"
"""Prefix of the name of an annotator that is a model; the model's name follows."""


def is_model(annotator: str | None) -> bool:
    """Return whether an annotator is a model, by its name."""
    return annotator is not None and annotator.startswith(OF_MODEL)


class Problem(NamedTuple):
    """Why a row is quarantined: the check it fails (a column of the contract) and the reason in words."""

    check: str
    text: str


class BadRow(Exception):
    """A row that can't be read in its format."""

    def __init__(self, check: str, text: str) -> None:
        super().__init__(text)
        self.problem = Problem(check, text)


class RawRow(NamedTuple):
    """A source's row: its 1-based number, and its fields or, if unreadable, what is wrong and the text."""

    number: int
    data: Mapping[str, object]
    problem: Problem | None = None
    others: tuple[int, ...] = ()
    """Numbers of further rows from which it was combined."""
    extra: Mapping[str, object] = MappingProxyType({})
    """Values of further columns that a user's suite asks for, as the source has them."""


class Ballot(NamedTuple):
    """Votes for the first response, for the second, and for neither."""

    first: int
    second: int
    equal: int


@dataclass(slots=True)
class Row:
    """A parsed row. `item` is its canonical form, None if it has none."""

    source: str
    raw: RawRow
    """The row as the source has it."""
    item: CanonicalRow | None = None
    ballot: Ballot | None = None
    first_wins: bool | None = None
    """Whether the response that the source puts first is preferred; None if the format has no order."""
    cast: tuple[tuple[str | None, int], ...] = ()
    """Annotator and index in `Ballot` of each vote that is listed by itself; None without annotator."""
    lead: float | None = None
    """0 for a tie; else the lead of the deciding answer, if the ballot alone does not determine it."""
    decided_otherwise: bool = False
    """Whether experts or a model of the annotators decide, so that the number of votes does not matter."""
    given_out: bool = False
    """Whether Tether gave the pair out to label."""
    models: tuple[str, str] | None = None
    """The models that wrote the first and the second response, if the source names them."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def number(self) -> int:
        """Return the row's 1-based number in its source."""
        return self.raw.number

    @property
    def data(self) -> Mapping[str, object]:
        """Return the source's fields if the row has problems."""
        return self.raw.data if self.problems else {}

    @property
    def votes(self) -> tuple[tuple[str, int], ...]:
        """Return annotator and index in `Ballot` of each vote; empty unless all name their annotator."""
        named = tuple((annotator, side) for annotator, side in self.cast if annotator is not None)
        return named if len(named) == len(self.cast) else ()


def shown(value: object) -> str:
    """Return `value` for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def listed(names: Sequence[str]) -> str:
    """Return names for a message; only the first ones if there are many."""
    most, longest = 20, 80
    shorter = [name if 0 < len(name) <= longest else f"{name[:longest]}..." if name else "(no name)" for name in names]
    return ", ".join(shorter[:most]) + (f" and {len(names) - most} more" if len(names) > most else "") or "none"


def unclean(text: str) -> str | None:
    """Return the first forbidden character of `text`, as an escape; None if there is none."""
    match = _UNCLEAN.search(text)
    return ascii(match.group()) if match else None


def _kind_of(escaped: str) -> str:
    if escaped.startswith("'\\udc"):
        return "byte that is not UTF-8, shown as"
    return "replacement character" if escaped == _REPLACED else "control character"


def blank(text: str) -> bool:
    """Return whether `text` has nothing but white space and invisible characters."""
    return _INVISIBLE.fullmatch(text) is not None


def marker(text: str) -> str | None:
    """Return the first marker that templates put between turns, which would make a model see a turn in `text`; None if
    there is none.

    A role's label also counts at the start of a text, since the line breaks before it are stripped.
    """
    first = _LABEL.match(text) or _MARKERS.search(text)  # as one pattern, it would be tried at every character
    return first.group().strip() if first else None


def is_placeholder(text: str) -> bool:
    """Return whether the whole `text` is a missing value written as text, or an error of a program or an API."""
    return _PLACEHOLDER.fullmatch(text.strip()) is not None


def _suspicious(texts: str) -> bool:
    """Return whether any of several texts, in lines, may be `unclean` or have a `marker`. Asking once for all texts of
    a row takes half the time."""
    return bool(_UNCLEAN.search(texts) or "Human:" in texts or "Assistant:" in texts or _MARKERS.search(texts))


def most_common_format(
    rows: Sequence[RawRow], format_of: Callable[[Mapping[str, object]], str | None]
) -> tuple[str | None, list[str]]:
    """Return the format of most readable rows (None if none has one), and the fields' names."""
    readable = [row.data for row in rows if row.problem is None]
    formats = Counter(name for data in readable if (name := format_of(data))).most_common(1)
    return formats[0][0] if formats else None, sorted({str(name) for data in readable for name in data})


def refuse_unreadable(rows: Sequence[RawRow], path: object) -> None:
    """Raise an error if none of the first rows of a file can be read.

    Raises:
        UserError: the message names the first row and what is wrong with it.
    """
    if rows and all(row.problem is not None for row in rows):
        first = rows[0]
        assert first.problem is not None
        raise UserError(
            f"{path}: none of its first {counted(len(rows), 'row')} can be read. Row {first.number}: "
            f"{first.problem.text}. Check the file's format and delimiter, and that each row has as many cells as the "
            "header if it is CSV."
        )


def text_problems(prompt: list[Message], responses: dict[str, str], max_characters: int) -> list[Problem]:
    """Return the problems of one row's texts; `responses` are by the names used in messages."""
    problems = [Problem("roles_alternate", text)] if (text := wrong_order([m["role"] for m in prompt])) else []
    if any(blank(m["content"]) for m in prompt):
        problems.append(Problem("texts_filled", "empty prompt turn"))
    empty = [name for name, text in responses.items() if blank(text)]
    problems += [Problem("texts_filled", f"empty response: {name}") for name in empty]
    if len(responses) > 1 and not empty and len({seen(text).strip() for text in responses.values()}) == 1:
        same = len({text.strip() for text in responses.values()}) == 1
        text = "identical responses" if same else "the responses look the same; they differ in invisible characters"
        problems.append(Problem("responses_differ", text))
    problems += [
        Problem("no_placeholder", f"{name} is {shown(text.strip())}, which is no response")
        for name, text in responses.items()
        if is_placeholder(text)
    ]
    if named := next((name for name, text in _named(prompt, responses) if _MESSAGES.match(text)), None):
        text = (
            f"{named} is a list of messages written as text; write it as a list, which JSON Lines and Parquet can hold"
        )
        problems.append(Problem("turns_valid", text))
    if _suspicious("\n".join([*(m["content"] for m in prompt), *responses.values()])):
        problems += [
            Problem("text_clean", f"{_kind_of(char)} {char} in {name}")
            for name, text in _named(prompt, responses)
            if (char := unclean(text))
        ]
        problems += [
            Problem("no_markers", f"{text_marker!r} in {name}")
            for name, text in _named(prompt, responses)
            if (text_marker := marker(text))
        ]
    length = sum(len(m["content"]) for m in prompt) + max(map(len, responses.values()), default=0)
    if length > max_characters:
        text = f"{length} characters, more than data.max_characters ({max_characters})"
        problems.append(Problem("length_within", text))
    return problems


def _named(prompt: list[Message], responses: dict[str, str]) -> Iterator[tuple[str, str]]:
    yield from ((f"prompt turn {i}", m["content"]) for i, m in enumerate(prompt, 1))
    yield from responses.items()


def wrong_order(roles: Sequence[str]) -> str | None:
    """Return why a chat template would not accept the roles of a prompt's turns; None if they are in order."""
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if "system" in turns:
        return f"turn {roles.index('system', len(roles) - len(turns)) + 1} is a second or late system message"
    for before, after in pairwise(turns):
        if before == after:
            return f"two {after} turns in a row"
    return None if turns and turns[-1] == "user" else "the turn before the response is not the user's"
