"""Progress of the labels that a run waits for. It is stored in the run's folder and shown wherever the run is."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from components.base.files import write_whole
from components.base.paths import read_regular

PROGRESS = "labels.json"
"""The file's name in a run's folder."""


@dataclass(frozen=True)
class LabelProgress:
    """How many of a batch's labels are answered."""

    answered: int
    """Number of answered labels."""
    total: Annotated[int, Field(alias="asked")]
    """Number of labels in the complete batch."""
    address: str = ""
    """Address of the review page; empty if raters fill in files."""
    raters: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each rater the numbers of answered and requested labels."""

    @property
    def share(self) -> float:
        return self.answered / self.total if self.total else 0.0

    @property
    def complete(self) -> bool:
        """Return whether no label is missing."""
        return 0 < self.total <= self.answered

    @property
    def text(self) -> str:
        """Return the progress as text, such as `57 of 144 labels (39 %)`; never 100 % while a label is missing."""
        return f"{self.answered} of {self.total} labels ({int(100 * self.share)} %)"

    def as_json(self) -> dict[str, object]:
        """Return it as its file and `tether people status --json` hold it."""
        return _JSON.dump_python(self, mode="json", by_alias=True)


_JSON = TypeAdapter(LabelProgress)


def write_progress(folder: Path, progress: LabelProgress) -> None:
    write_whole(folder / PROGRESS, json.dumps(progress.as_json()))


def read_progress(folder: Path) -> LabelProgress | None:
    """Return the progress stored in a run's folder; None if there is none or it can't be read."""
    try:
        return _JSON.validate_json(read_regular(folder / PROGRESS))
    except (OSError, ValidationError):
        return None
