"""Why a (sub-)stage was computed or reused, in the form of run.json."""

from typing import Literal

from pydantic import BaseModel, Field

from components.keys.changes import Change


class Hit(BaseModel):
    """A (sub-)stage was not computed, because the store had its result."""

    outcome: Literal["hit"] = "hit"
    run: str
    """The run that computed it."""
    pinned: bool = False
    """Whether a rerun reused the artifact of the run that it continues from."""
    differing: list[Change] = Field(default_factory=list)
    """The options in which the two runs differ. None of them is in the key, so none may change a result."""


class Missed(BaseModel):
    """A (sub-)stage was computed."""

    outcome: Literal["computed"] = "computed"
    run: str
    """The run that computed it."""
    reason: str
    """Why the look-up of its key found nothing."""
    because: Literal["asked", "damaged", "first"]


class RecordName(BaseModel):
    """Identifies a record."""

    run: str
    key: str


class Changed(Missed):
    """A (sub-)stage was computed because something differs from its earlier records."""

    because: Literal["changed"] = "changed"  # type: ignore[assignment]
    compared_with: RecordName
    """The record with the fewest changes among the newest of the stage."""
    changes: list[Change]


Explanation = Hit | Missed | Changed
