"""Compare a returned cell with the text that was given out, allowing for everything that spreadsheets change."""

import itertools
import re

from components.data.spreadsheet import unprotect

CELL = 32_767
"""The largest number of characters (UTF-16 units) in an Excel cell."""
_NEARLY = 700
"""Number of further characters that a cell cut by Excel may have lost to protective apostrophes and final white
space."""
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_BLANKS = re.compile(r"[^\S\n]+(?=\n|\Z)")


def plain(text: str) -> str:
    """Return `text` without what spreadsheets change: the kind of line breaks, white space at the end of lines and of
    the text, protective apostrophes, and control characters (which are invisible, and which some programs drop)."""
    text = _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _BLANKS.sub("", text).rstrip()
    while (bare := unprotect(text)) != text:
        text = bare
    return text


def same(given: str, returned: str, lossy: bool = False) -> bool:
    """Return whether `returned` can be `given` after a spreadsheet's changes.

    Args:
        given, returned: texts after `plain`.
        lossy: the file was saved in Windows-1252, which replaces each character that it lacks by one or two others.
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
    """Return whether `returned` has the parts of `given` that Windows-1252 can hold, about as far apart."""
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
    """Return the index of the first character in which two texts differ."""
    pairs = zip(given, returned, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(given), len(returned)))
