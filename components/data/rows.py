"""A row on its way from a source to a split: what was read, what it means, and what is wrong with it."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, str]
Item = dict[str, Any]

# C0 controls but tab, line feed and carriage return; delete; C1; lone surrogates (bytes that were no UTF-8)
_UNCLEAN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")


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
    data: dict[str, Any]
    problem: Problem | None = None


class Ballot(NamedTuple):
    """Votes for the first response, for the second, and for neither."""

    first: int
    second: int
    equal: int


@dataclass(slots=True)
class Row:
    """A read row. `item` is its canonical form (None where it has none), `data` its source fields if it is bad."""

    source: str
    number: int
    item: Item | None = None
    ballot: Ballot | None = None
    first_wins: bool | None = None
    """Whether the response that the source puts first is preferred; None where the format has no order."""
    data: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def unclean(text: str) -> str | None:
    """The first character of `text` that no text should hold, as an escape; None if there is none."""
    found = _UNCLEAN.search(text)
    return ascii(found.group()) if found else None


def most_common_format(
    rows: Sequence[RawRow], format_of: Callable[[Mapping[str, Any]], str | None]
) -> tuple[str | None, list[str]]:
    """The format that most readable rows have by their fields (None where none has one), and the fields' names."""
    readable = [row.data for row in rows if row.problem is None]
    found = Counter(name for data in readable if (name := format_of(data))).most_common(1)
    return found[0][0] if found else None, sorted({str(name) for data in readable for name in data})


def text_problems(prompt: list[Message], responses: dict[str, str], max_characters: int) -> list[Problem]:
    """What is wrong with the texts of one row; `responses` by the name that reasons call them."""
    problems = []
    if any(not m["content"].strip() for m in prompt):
        problems.append(Problem("texts_filled", "empty prompt turn"))
    empty = [name for name, text in responses.items() if not text.strip()]
    problems += [Problem("texts_filled", f"empty response: {name}") for name in empty]
    if len(responses) > 1 and not empty and len({text.strip() for text in responses.values()}) == 1:
        problems.append(Problem("responses_differ", "identical responses"))
    named = {f"prompt turn {i}": m["content"] for i, m in enumerate(prompt, 1)} | responses
    problems += [
        Problem("text_clean", f"control character {char} in {name}")
        for name, text in named.items()
        if (char := unclean(text))
    ]
    length = sum(len(m["content"]) for m in prompt) + max(map(len, responses.values()), default=0)
    if length > max_characters:
        problems.append(
            Problem("length_within", f"{length} characters, more than data.max_characters ({max_characters})")
        )
    return problems
