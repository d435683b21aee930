"""JSON from outside, read strictly: what one value can't hold is an error of that value, and says what is wrong."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

DEEPEST = 100
"""Lists and objects inside each other. JSON's own reader fails at about a thousand, its writer at fewer."""
TOO_DEEP = f"lists and objects are nested more than {DEEPEST} deep"


class BadJson(ValueError):
    """JSON that can't be read. `line` is where it breaks its grammar, None where it only holds what can't be held;
    `more` says that a whole value stands there, and then something else."""

    def __init__(self, text: str, line: int | None = None, place: int = 0, more: bool = False) -> None:
        super().__init__(f"{text} at character {place}" if place else text)
        self.text, self.line, self.more = text, line, more


def parse_json(text: str) -> Any:
    """The value of a JSON text, strictly: no NaN, no key twice, no number or nesting that others can't take.

    Raises:
        BadJson: it isn't that.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise BadJson(error.msg, error.lineno, error.pos + 1, error.msg == "Extra data") from error
    except RecursionError as error:
        raise BadJson(TOO_DEEP) from error
    except BadJson:
        raise
    except ValueError as error:  # a whole number of over 4,300 digits
        raise BadJson("a number has too many digits to be read") from error
    if text.count("[") + text.count("{") > DEEPEST and depth_of(value) > DEEPEST:
        raise BadJson(TOO_DEEP)
    return value


def elements(text: str) -> Iterator[str]:
    """The texts of the elements of a JSON array, found by its brackets."""
    depth = start = 0
    for found in _TOKEN.finditer(text):
        token = found[0]
        if token in "[{":
            depth += 1
            start = found.end() if depth == 1 else start
        elif token in "]}":
            depth -= 1
        if (token == "," and depth == 1) or (token == "]" and depth == 0):
            yield text[start : found.start()]
            start = found.end()
    if depth:  # it breaks off
        yield text[start:]


_TOKEN = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[][{},]', re.DOTALL)


def twice(names: Iterable[str]) -> str:
    """The names that stand more than once, in quotes; empty where none does."""
    return ", ".join(repr(name) for name, count in Counter(names).items() if count > 1)


def _no_constant(name: str) -> NoReturn:
    raise BadJson(f"{name} is not a JSON value")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise BadJson(f"a key appears twice: {twice(name for name, _ in pairs)}. Keep one")
    return found


def depth_of(value: Any) -> int:
    """How deep lists and objects stand inside each other, counted up to one more than `DEEPEST`."""
    depth, level = 0, [value]
    while level and depth <= DEEPEST + 1:
        level = [
            inner
            for each in level
            if isinstance(each, list | dict)
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        depth += 1
    return depth - 1
