"""Progress of the labels that a run waits for. It is stored in the run's folder and shown wherever the run is."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

from components.base.files import write_whole
from components.base.paths import read_regular

PROGRESS = "labels.json"
"""The file's name in a run's folder."""


class LabelProgress(NamedTuple):
    """How many of a batch's labels are answered."""

    answered: int
    """Number of answered labels."""
    asked: int
    """Number of labels in the complete batch."""
    address: str = ""
    """Address of the review page; empty if raters fill in files."""
    raters: Mapping[str, tuple[int, int]] = MappingProxyType({})
    """For each rater the numbers of answered and requested labels."""

    @property
    def share(self) -> float:
        """Return the share of answered labels."""
        return self.answered / self.asked if self.asked else 0.0

    @property
    def complete(self) -> bool:
        """Return whether no label is missing."""
        return 0 < self.asked <= self.answered

    @property
    def text(self) -> str:
        """Return the progress as text, such as `57 of 144 labels (39 %)`; never 100 % while a label is missing."""
        return f"{self.answered} of {self.asked} labels ({int(100 * self.share)} %)"


class _Kept(BaseModel):
    answered: int
    asked: int
    address: str = ""
    raters: dict[str, tuple[int, int]] = {}


def write_progress(folder: Path, progress: LabelProgress) -> None:
    """Store the progress in a run's folder."""
    kept = _Kept(**{**progress._asdict(), "raters": dict(progress.raters)})
    write_whole(folder / PROGRESS, kept.model_dump_json().encode())


def read_progress(folder: Path) -> LabelProgress | None:
    """Return the progress stored in a run's folder; None if there is none or it can't be read."""
    try:
        kept = _Kept.model_validate_json(read_regular(folder / PROGRESS))
    except (OSError, ValidationError):
        return None
    return LabelProgress(kept.answered, kept.asked, kept.address, kept.raters)
