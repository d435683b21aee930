"""Show prompts, replies and guidelines as HTML in which they are only text."""

import re
from typing import NamedTuple

from markupsafe import Markup, escape

from components.human_eval.sheet import guideline_blocks

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e"
    "\u2060-\u206f\u2800\u3164\ufe00-\ufe0e\ufeff\uffa0\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e0fff]"
)
"""Control and zero-width characters, marks that change the writing direction, blanks that are not white space, and
surrogates. U+FE0F, which turns a sign into an emoji, is not among them, because its effect is visible."""
_JOINERS = "\u200c\u200d"
_CHARACTERS, _LINES = 1_500, 16
"""A text with more characters or lines is shown at limited height, with `show all` above it."""


class ShownText(NamedTuple):
    """A text in the form that the page shows."""

    html: Markup
    length: int
    long: bool


def shown(text: str) -> ShownText:
    """Escape `text`, and show each invisible character as ⟨U+202E⟩. Joiners within a script or an emoji stay."""
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts, at = [], 0
    for match in _UNSEEN.finditer(text):
        place = match.start()
        around = text[max(0, place - 1) : place] + text[place + 1 : place + 2]
        if match[0] in _JOINERS and len(around) == 2 and not any(c.isascii() or _UNSEEN.match(c) for c in around):
            continue  # both neighbours are visible non-ASCII characters, which a joiner can join
        parts.append(escape(text[at:place]))
        parts.append(Markup('<span class="unseen">⟨U+{:04X}⟩</span>').format(ord(match[0])))
        at = match.end()
    parts.append(escape(text[at:]))
    return ShownText(Markup("").join(parts), len(text), len(text) > _CHARACTERS or text.count("\n") > _LINES)


def shown_guidelines(text: str) -> list[tuple[str, Markup]]:
    """Return guidelines as blocks of tag and text. Headings are those below the page's own, `h2` to `h4`."""
    tags = {f"h{level}": f"h{min(4, level + 1)}" for level in range(1, 7)}
    return [(tags.get(tag, tag), shown(block).html) for tag, block in guideline_blocks(text)]
