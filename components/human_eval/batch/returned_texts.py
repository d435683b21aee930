"""Compare a returned cell with the text that was given out, allowing for everything that spreadsheets change."""

import re

from components.data.spreadsheet import unprotect

CELL = 32_767
"""The largest number of characters (UTF-16 units) in an Excel cell."""
_NEARLY = 700
"""Number of further characters that a cell cut by Excel may have lost to protective apostrophes and final white
space."""
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LOST = re.compile(f"([^{re.escape(bytes(range(256)).decode('cp1252', 'ignore'))}]+)")
"""Characters that Windows-1252 lacks."""
_BLANKS = re.compile(r"[^\S\n]+(?=\n|\Z)")


def plain(text: str) -> str:
    """Return `text` without what spreadsheets change: the kind of line breaks, white space at the end of lines and of
    the text, protective apostrophes, and control characters (which are invisible, and which some programs drop)."""
    text = _UNSEEN.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))
    text = _BLANKS.sub("", text).rstrip()
    while (bare := unprotect(text)) != text:
        text = bare
    return text


def same(original: str, returned: str, lossy: bool = False) -> bool:
    """Return whether `returned` can be `original` after a spreadsheet's changes.

    Args:
        original, returned: texts after `plain`.
        lossy: the file was saved in Windows-1252, which replaces each character that it lacks by one or two others.
    """
    cut = _units(original) > CELL and CELL - _NEARLY <= _units(returned) <= CELL
    if returned == original or (cut and original.startswith(returned)):
        return True
    return lossy and _same_but_for_lost(original.replace("'", ""), returned.replace("'", ""))


def _units(text: str) -> int:
    return len(text.encode("utf-16-le", "surrogatepass")) // 2


def _same_but_for_lost(original: str, returned: str) -> bool:
    """Return whether `returned` has the parts of `original` that Windows-1252 can hold, about as far apart."""
    start, *parts = _LOST.split(original)
    rest = (  # an atomic group takes the nearest place, so that no text takes long
        f"(?>.{{{len(lost)},{2 * len(lost)}}}?{re.escape(part) or '$'})"
        for lost, part in zip(parts[::2], parts[1::2], strict=True)
    )
    return re.fullmatch(re.escape(start) + "".join(rest), returned, re.DOTALL) is not None


def first_difference(original: str, returned: str) -> int:
    """Return the index of the first character in which two texts differ."""
    pairs = zip(original, returned, strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), min(len(original), len(returned)))
