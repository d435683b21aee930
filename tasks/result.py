"""What goes into a stage and what comes out, between the runner, the tracking and the flows."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.base.errors import UserError
from components.base.hashing import digest_file
from components.base.nested import group
from components.base.settings import Settings
from components.gates.judging import Verdict
from components.store.store import Record, digest_folder
from tasks.stages import Stage

State = Literal[
    "failed", "gate_failed", "interrupted", "running", "awaiting_labels", "waived", "passed", "cached", "skipped",
    "not_run",
]  # fmt: skip
"""A stage's states by how bad they are; a run's state is the worst of its stages'."""


class Input(Settings):
    """What goes into a stage: an earlier stage's artifact, or an external file or folder (data, a model, a sheet)."""

    name: str = ""
    """What the stage calls it."""
    digest: str
    """sha256: a file's bytes, or a folder's manifest."""
    path: Path
    stage: str = ""
    """The pipeline's stage that made it in this run; empty for an external one."""
    stored: bool = False
    """An artifact of this home's store."""
    lineage: dict[str, str] = Field(default_factory=dict)
    """Digest of everything that it was made from, by input name."""
    imported: bool = False
    """Whether an imported record stands for it, or for anything that it was made from in this run."""

    @classmethod
    def of(cls, path: Path) -> "Input":
        """Read and digest the external file or folder `path`. Raises UserError if it isn't there, or can't be read."""
        try:
            digest = digest_folder(path) if path.is_dir() else digest_file(path)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}.") from error
        return cls(digest=digest, path=path)

    def check(self) -> None:
        """Raise `InputChanged` if the file is no longer what was digested. The store looks after what is `stored`."""
        if not self.stored and (not self.path.exists() or Input.of(self.path).digest != self.digest):
            raise InputChanged(
                f"{self.path} changed after the run began (its sha256 was {self.digest[:12]}), so nothing was computed "
                "from it. Run again, and leave the file as it is until its stage is done."
            )


class InputChanged(UserError):
    """What a stage reads was replaced between its digest and the stage's end."""


@dataclass(frozen=True)
class StageResult:
    """A stage that is done: computed now, or found in the store."""

    stage: Stage
    digest: str
    path: Path
    """The artifact as a folder (links into the store; don't write there)."""
    state: State
    """`passed`, `cached`, `waived`, `gate_failed` or `skipped`; `running` for a sub-stage that isn't the last of
    its stage."""
    verdicts: Sequence[Verdict]
    cached: bool
    seconds: float
    record: Record
    inputs: Mapping[str, Input] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the stage as the pipeline shows it."""
        return self.stage.shown

    @property
    def imported(self) -> bool:
        """Return whether another home's word stands for this, or for anything that it was made from in this run."""
        return bool(self.record.imported) or any(given.imported for given in self.inputs.values())

    def as_input(self, name: str) -> Input:
        """This artifact as what a later stage calls `name`."""
        return Input(
            name=name, digest=self.digest, path=self.path, stage=self.name, stored=True,
            lineage=lineage_of(self.inputs.values()), imported=self.imported,
        )  # fmt: skip


def is_skipped(record: Record) -> bool:
    """Return whether the config left the stage of a record out, so that its artifact is what went in: `sft.train` is
    false."""
    return group(record.job, record.stage).get("train") is False


def lineage_of(inputs: Collection[Input]) -> dict[str, str]:
    """Digest of `inputs` and of everything that they were made from, by input name, however far back."""
    further = {name: digest for given in inputs for name, digest in given.lineage.items()}
    return further | {given.name: given.digest for given in inputs}


Given = Mapping[str, StageResult | Input]
"""What a stage is given, by the name that it has for it."""


def as_inputs(given: Given) -> dict[str, Input]:
    """`given` in one form, each under its name."""
    return {
        name: each.as_input(name) if isinstance(each, StageResult) else each.model_copy(update={"name": name})
        for name, each in given.items()
    }
