"""The inputs and results of stages, shared by the runner, the tracking and the flows."""

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import Field

from components.base.errors import UserError
from components.base.hashing import digest_file
from components.base.nested import group
from components.base.paths import holds_model_or_data, open_regular
from components.base.settings import Settings
from components.gates.judging import Verdict
from components.store.records import SHA
from components.store.store import Record, digest_folder
from tasks.stages import Stage

State = Literal[
    "failed", "gate_failed", "interrupted", "running", "awaiting_labels", "waived", "passed", "cached", "skipped",
    "not_run",
]  # fmt: skip
"""A stage's states, worst first. A run's state is the worst of its stages'."""


class Input(Settings):
    """An input of a stage: an earlier stage's artifact, or an external file or folder (data, a model, a sheet)."""

    name: str = ""
    """The stage's name for the input."""
    digest: str
    """sha256: a file's bytes, or a folder's manifest."""
    path: Path
    hub: str = ""
    """`owner/name@commit` of the hub dataset that the file is a copy of; empty for anything else."""
    stage: str = ""
    """The pipeline's stage that made it in this run; empty for an external input."""
    stored: bool = False
    """Whether it is an artifact in this home's store."""
    lineage: dict[str, str] = Field(default_factory=dict)
    """The digest of everything it was made from, by input name."""
    imported: bool = False
    """Whether it, or anything it was made from in this run, is based on an imported record."""

    @classmethod
    def of(cls, path: Path) -> "Input":
        """Read and digest the external file or folder `path`. Raises UserError if it is missing or can't be read."""
        try:
            digest = digest_folder(path) if path.is_dir() else digest_file(path)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}.") from error
        return cls(digest=digest, path=path)

    @classmethod
    def named(cls, path: Path) -> "Input":
        """Do the same for a path that a user named, unless it is a folder without a model or a saved dataset.

        Raises:
            UserError: it is such a folder, or as `of`.
        """
        if path.is_dir() and not SHA.fullmatch(path.name) and not holds_model_or_data(path):  # a digest: an artifact
            raise UserError(
                f"{path} is a folder, and neither a model (config.json beside its weights) nor a dataset that "
                "save_to_disk of datasets wrote. Name the file or the folder itself."
            )
        return cls.of(path)

    def check(self) -> None:
        """Raise `InputChanged` unless `digest` is the sha256 of an external file's content, read anew without `of`.
        `stored` inputs are not checked."""
        digest = Input.of(self.path).digest if self.path.is_dir() and not self.stored else ""
        with suppress(OSError), open_regular(self.path) as file:  # it may be gone; a folder is no regular file
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if not self.stored and digest != self.digest:
            raise InputChanged(
                f"{self.path} changed after the run began (its sha256 was {self.digest[:12]}), so nothing was computed "
                "from it. Run again, and leave the file as it is until its stage is done. If it did not change, the "
                "digest is not its content's sha256: this is a fault in the code."
            )


class InputChanged(UserError):
    """A stage's input changed between its digest and the end of the stage."""


@dataclass(frozen=True)
class StageResult:
    """A finished stage: newly computed, or found in the store."""

    stage: Stage
    digest: str
    path: Path
    """The artifact's folder (links into the store; do not write to it)."""
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
        return self.stage.group

    @property
    def imported(self) -> bool:
        """Return whether it, or anything it was made from in this run, is based on an imported record."""
        return bool(self.record.imported) or any(source.imported for source in self.inputs.values())

    def as_input(self, name: str) -> Input:
        """Return this artifact as the input `name` of a later stage."""
        return Input(
            name=name, digest=self.digest, path=self.path, stage=self.name, stored=True,
            lineage=lineage_of(self.inputs.values()), imported=self.imported,
        )  # fmt: skip


def is_skipped(record: Record) -> bool:
    """Return whether the config skips the stage of a record, so that its artifact is its input: `sft.train` is
    false."""
    return group(record.job, record.stage).get("train") is False


def lineage_of(inputs: Collection[Input]) -> dict[str, str]:
    """Return the digests of `inputs` and of everything they were made from, by input name."""
    further = {name: digest for source in inputs for name, digest in source.lineage.items()}
    return further | {source.name: source.digest for source in inputs}


Given = Mapping[str, StageResult | Input]
"""A stage's inputs, by the stage's names for them."""
StageRunner = Callable[[Stage, Settings, Given], StageResult]
"""Runs one stage with its options and inputs, and judges it by its gates."""


def as_inputs(sources: Given) -> dict[str, Input]:
    """Return `sources` with every entry converted to an `Input` of its name."""
    return {
        name: source.as_input(name) if isinstance(source, StageResult) else source.model_copy(update={"name": name})
        for name, source in sources.items()
    }
