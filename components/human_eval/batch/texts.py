"""Whether a cell that came back holds the text that was given out: all that spreadsheets do to a text is forgiven."""

import itertools
import re

from components.data.spreadsheet import unprotect

CELL = 32_767
"""Characters (UTF-16 units) that Excel keeps of a cell."""
_NEARLY = 700
"""A cell that Excel cut may have lost so many more: protective apostrophes count, and white space at its end goes."""
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BLANKS = re.compile(r"[^\S\n]+(?=\n|\Z)")


def plain(text: str) -> str:
    """`text` without what spreadsheets change: the kind of line breaks, white space at the end of lines and of the
    text, protective apostrophes, control characters (they can't be seen, and some programs drop them)."""
    text = _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _BLANKS.sub("", text).rstrip()
    while (bare := unprotect(text)) != text:
        text = bare
    return text


def same(given: str, returned: str, lossy: bool = False) -> bool:
    """Whether `returned` is `given` as far as a spreadsheet gives it back.

    Args:
        given, returned: as `plain` leaves them.
        lossy: the file was saved in Windows-1252, where a character that it has not becomes one or two others.
    """
    if returned == given:
        return True
    cut = _units(given) > CELL and CELL - _NEARLY <= _units(returned) <= CELL
    if cut and given.startswith(returned):
        return True
    return lossy and _same_but_for_lost(given.replace("'", ""), returned.replace("'", ""), cut)


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _same_but_for_lost(given: str, returned: str, cut: bool) -> bool:
    """Whether the parts of `given` that Windows-1252 has stand in `returned`, with about as much between them."""
    place, lost = 0, 0
    for known, characters in itertools.groupby(given, _in_windows_1252):
        part = "".join(characters)
        if not known:
            lost = len(part)
            continue
        found = returned.find(part, place + lost, place + 2 * lost + len(part))
        if found < 0:
            return cut and any(part.startswith(returned[place + n :]) for n in range(lost, 2 * lost + 1))
        place, lost = found + len(part), 0
    return lost <= len(returned) - place <= 2 * lost


def _in_windows_1252(character: str) -> bool:
    try:
        character.encode("cp1252")
    except UnicodeEncodeError:
        return False
    return True


def first_difference(given: str, returned: str) -> int:
    """The place of the first character in which two texts differ."""
    pairs = zip(given, returned, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(given), len(returned)))
