"""Read JSON from outside strictly. What other readers could not take is refused with a message that says why."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

DEEPEST = 100
"""Levels of nested lists and objects that are allowed. Python's own JSON reader fails at about a thousand."""
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"


class BadJson(ValueError):
    """JSON that is refused. `line` is that of a syntax error, None if only a value is not allowed. `more` says that
    text follows a complete value."""

    def __init__(self, text: str, line: int | None = None, place: int = 0, more: bool = False) -> None:
        super().__init__(f"{text} at character {place}" if place else text)
        self.text, self.line, self.more = text, line, more


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is not a JSON value: write null")


def parse_json(text: str, constants: Callable[[str], Any] = _no_constant) -> Any:
    """Return the value of a JSON text. Refuse NaN, repeated keys, and numbers or nesting that other readers can't take.

    `constants` makes a value of the text `NaN`, `Infinity` or `-Infinity` in place of refusing it.

    Raises:
        BadJson: the text is not such JSON.
    """
    try:
        value = json.loads(text, parse_constant=constants, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.lineno, error.pos + 1, error.msg == "Extra data") from error
    except RecursionError as error:
        raise BadJson(TOO_DEEP) from error
    except BadJson:
        raise
    except ValueError as error:  # an integer of over 4,300 digits
        raise BadJson("a number has too many digits to be read") from error
    if text.count("[") + text.count("{") > DEEPEST and depth_of(value) > DEEPEST:
        raise BadJson(TOO_DEEP)
    return value


def elements(text: str) -> Iterator[str]:
    """Yield the text of each element of a JSON array, found by matching brackets."""
    depth = start = 0
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in "[{":
            depth += 1
            start = match.end() if depth == 1 else start
        elif token in "]}":
            depth -= 1
        if (token == "," and depth == 1) or (token == "]" and depth == 0):
            yield text[start : match.start()]
            start = match.end()
    if depth:  # the array is cut off
        yield text[start:]


_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},]', re.DOTALL)


def twice(names: Iterable[str]) -> str:
    """Return the repeated names, in quotes; empty if none is repeated."""
    return ", ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise BadJson(f"a key appears twice: {twice(name for name, _ in pairs)}. Keep one")
    return value


def depth_of(value: Any) -> int:
    """Return how deeply lists and objects are nested, counted up to `DEEPEST` + 1."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST + 1:
        level = [
            inner
            for outer in level
            if isinstance(outer, list | dict)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        depth += 1
    return depth - 1
