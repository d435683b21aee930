"""Returned sheets, for tests."""

from collections.abc import Sequence
from pathlib import Path

from components.base.errors import Mistakes
from components.human_eval.batch.reading import parse_sheet
from components.human_eval.sheet import SheetRow


def read_sheet(path: Path, raters: int, valid: Sequence[str]) -> list[SheetRow]:
    """The rows of a returned sheet. Raises UserError as `parse_sheet`, and Mistakes with all mistakes in it."""
    found = parse_sheet(path, raters, valid)
    if found.mistakes:
        raise Mistakes(*found.mistakes)
    return found.rows
