"""Text of others (a name, a reason, a metric of an imported record) where people read it: it must command nothing.

A terminal obeys control characters, Markdown and Mermaid have syntax of their own. HTML is escaped by its templates.
"""

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters but for tab and line feed, marks that turn the direction of writing, and halves of characters."""
_MARKDOWN = re.compile(
    r"[\\`*\[\]|~]|<(?=[A-Za-z/!?])|^>|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|&(?=#?\w+;)"
    r"|^#+(?=\s|$)|^[+-](?=\s|$)|^-(?=-+$)|^=(?==*$)"
)


def plain(text: str) -> str:
    r"""Return `text` for a terminal: each character that could command it as its escape (`\x1b`). Lines stay lines."""
    return _COMMANDS.sub(lambda found: _escape(found[0]), text.replace("\r\n", "\n"))


def line(text: str) -> str:
    """Return `text` on one line: white space becomes single spaces, then as `plain`."""
    return plain(" ".join(text.split()))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `number` with its noun (`1 row`, `2 rows`); `plural` where the plural is not noun + s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def markdown(text: str) -> str:
    """Return `text` as words of a Markdown paragraph, list or table: one line, with no syntax in it."""
    escaped = _MARKDOWN.sub(lambda found: "&lt;" if found[0] == "<" else f"\\{found[0]}", line(text))
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", escaped)


def markdown_code(text: str) -> str:
    """Return `text` as a code span of Markdown, also within a table."""
    return f"`{line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def mermaid(text: str) -> str:
    """Return `text` as a label of Mermaid, quoted (https://mermaid.js.org/syntax/flowchart.html#entity-codes)."""
    return '"' + re.sub(r"[^\w .,:/()=+-]", lambda found: f"#{ord(found[0])};", line(text)) + '"'


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
