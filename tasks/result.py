"""What goes into a stage and what comes out, between the runner, the tracking and the flows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from components.artifacts import Record, digest_folder
from components.canonical import digest_file
from components.errors import UserError
from components.gates import Verdict
from tasks.stages import Stage


@dataclass(frozen=True)
class Source:
    """A file or folder that no stage of this run made: a data file, a pretrained model, a filled sheet."""

    path: Path
    digest: str
    """sha256: a file's bytes, or a folder's manifest."""
    stored: bool = False
    """An artifact of this home's store, made by an earlier run."""

    @classmethod
    def of(cls, path: Path) -> "Source":
        """Read and digest `path`.

        Raises:
            UserError: it isn't there, or can't be read.
        """
        try:
            digest = digest_folder(path) if path.is_dir() else digest_file(path)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}.") from error
        return cls(path=path, digest=digest)

    def check(self) -> None:
        """Raises `SourceChanged` if it is no longer what was digested. The store looks after what is `stored`."""
        if not self.stored and (not self.path.exists() or Source.of(self.path).digest != self.digest):
            raise SourceChanged(
                f"{self.path} is another one than when the run began (sha256 {self.digest[:12]} then), so nothing "
                "was made of it. Run again, and leave it as it is until its stage is done."
            )


class SourceChanged(UserError):
    """What a stage reads was replaced between its digest and the stage's end."""


@dataclass(frozen=True)
class StageResult:
    """A stage that is done: computed now, or found in the store."""

    stage: Stage
    key: str
    digest: str
    path: Path
    """The artifact as a folder (links into the store; don't write there)."""
    state: str
    """`passed`, `cached`, `waived` or `gate_failed`; `running` for a sub-stage that isn't the last of its stage."""
    metrics: Mapping[str, float]
    verdicts: Sequence[Verdict]
    cached: bool
    seconds: float
    record: Record
    inputs: Mapping[str, "StageResult | Source"] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The stage as the pipeline shows it."""
        return self.stage.shown

    @property
    def lineage(self) -> dict[str, str]:
        """Digest of everything this was made from, by input name, however far back."""
        found: dict[str, str] = {}
        for given in self.inputs.values():
            if isinstance(given, StageResult):
                found.update(given.lineage)
        found.update({name: given.digest for name, given in self.inputs.items()})
        return found
