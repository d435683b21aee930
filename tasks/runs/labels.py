"""How far people are with the labels that a run waits for; kept in the run's folder, shown wherever the run is."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from components.base.files import write_whole

PROGRESS = "labels.json"
"""In a run's folder."""


class LabelProgress(NamedTuple):
    """What is answered of a batch."""

    answered: int
    """Labels that are there."""
    asked: int
    """Labels that complete the batch."""
    address: str = ""
    """Of the review page; empty where raters fill in files."""
    raters: Mapping[str, tuple[int, int]] = MappingProxyType({})
    """By rater: answered, and asked for."""

    @property
    def share(self) -> float:
        """Of the labels asked for."""
        return self.answered / self.asked if self.asked else 0.0

    @property
    def complete(self) -> bool:
        """Return whether no label is missing."""
        return 0 < self.asked <= self.answered

    @property
    def text(self) -> str:
        """As `57 of 144 labels (39 %)`; never 100 % while one is missing."""
        return f"{self.answered} of {self.asked} labels ({int(100 * self.share)} %)"


class _Kept(BaseModel):
    answered: int
    asked: int
    address: str = ""
    raters: dict[str, tuple[int, int]] = {}


def write_progress(folder: Path, progress: LabelProgress) -> None:
    """Keep it in a run's folder."""
    kept = _Kept(**{**progress._asdict(), "raters": dict(progress.raters)})
    write_whole(folder / PROGRESS, kept.model_dump_json().encode())


def read_progress(folder: Path) -> LabelProgress | None:
    """Return what a run's folder says; None where nothing was kept, or what was kept can't be read."""
    try:
        kept = _Kept.model_validate_json((folder / PROGRESS).read_bytes())
    except (OSError, ValidationError):
        return None
    return LabelProgress(kept.answered, kept.asked, kept.address, kept.raters)
