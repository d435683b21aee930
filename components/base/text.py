"""Make text from others (a name, a reason, an imported record's metric) safe to show.

A terminal obeys control characters, and Markdown has its own syntax. HTML is escaped by its templates.
"""

import re

_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, marks that change the writing direction, and surrogates."""
_MARKDOWN = re.compile(
    r"[\\`*\[\]|~]|<(?=[A-Za-z/!?])|^>|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|&(?=#?\w+;)"
    r"|^#+(?=\s|$)|^[+-](?=\s|$)|^-(?=-+$)|^=(?==*$)"
)


def plain(text: str) -> str:
    r"""Return `text` for a terminal: each character that could control it is shown as its escape (`\x1b`)."""
    return _COMMANDS.sub(lambda match: match[0].encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def line(text: str) -> str:
    """Return `text` on one line: white space becomes single spaces, then as `plain`."""
    return plain(" ".join(text.split()))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return `number` with its noun (`1 row`, `2 rows`); `plural` where the plural is not noun + s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def markdown(text: str) -> str:
    """Return `text` on one line with Markdown's syntax escaped, for a paragraph, list or table."""
    escaped = _MARKDOWN.sub(lambda match: "&lt;" if match[0] == "<" else f"\\{match[0]}", line(text))
    return re.sub(r"^(\d+)([.)])(?=\s|$)", r"\1\\\2", escaped)


def markdown_code(text: str) -> str:
    """Return `text` as a Markdown code span, which may stand in a table."""
    return f"`{line(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"
