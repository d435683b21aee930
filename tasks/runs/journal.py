"""The files in a run's folder for MLflow, other than status, points, cards and report. tasks/tracking sends them.

runs/<run>/done/<stage>.json   the result of a (sub-)stage, with this run's verdicts
runs/<run>/mlflow.json         what MLflow has of the run, and its ids there; replaced in one step
"""

import getpass
import logging
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from components.base.errors import UserError
from components.base.files import make_folder, write_whole
from components.base.hashing import digest_json
from components.base.nested import group
from components.base.paths import read_regular
from components.base.text import line
from components.gates.judging import Verdict
from components.keys.code_version import CodeVersion
from components.store.store import Record
from tasks.result import Input, StageResult, lineage_of
from tasks.runs.config import run_values
from tasks.runs.points import points_file, read_points
from tasks.runs.run_label import LONGEST_VALUE
from tasks.stages import ends_group, group_of

logger = logging.getLogger(__name__)

REPORT, REPORT_TEXT = "report.html", "report.md"
SENT = "mlflow.json"
SENDING_LOCK = "mlflow.lock"
"""The file that is locked while a run's folder is sent to MLflow (`components.store.leases`)."""


class Done(BaseModel):
    """A finished (sub-)stage with everything that MLflow shows of it, so that recording needs neither store nor
    code."""

    # Metrics can be NaN, which JSON does not have.
    model_config = ConfigDict(ser_json_inf_nan="strings")

    time: int
    """When it finished (ms)."""
    record: Record
    path: Path
    """The artifact's folder."""
    run: str
    """The run that uses it. It is a hit if `record.run` is another run."""
    user: str
    """The user of `run`."""
    step: int
    """The step of the final metrics: after the last step of the curves."""
    verdicts: list[Verdict]
    inputs: list[Input]
    attachments: dict[str, Path]
    """Files by name; empty for a hit, which links to the run that has them."""
    imported: bool = False
    """Whether it, or anything it was made from, is based on an imported record. Then only a person can promote it."""

    @classmethod
    def of(cls, result: StageResult, folder: Path, attachments: Mapping[str, Path], user: str) -> Self:
        """Return the entry for `result` in the run in `folder`. `user` has had it computed or scored."""
        steps = (point["step"] for point in read_points(points_file(folder, result.name)))
        return cls(
            time=time.time_ns() // 1_000_000,
            record=result.record,
            path=result.path.absolute(),
            run=folder.name,
            step=max(steps, default=-1) + 1,
            user=user,
            verdicts=list(result.verdicts),
            inputs=[source.model_copy(update={"path": source.path.absolute()}) for source in result.inputs.values()],
            attachments={name: path.absolute() for name, path in attachments.items()},
            imported=result.imported,
        )

    @property
    def group(self) -> str:
        """Return the pipeline's stage that it belongs to."""
        return group_of(self.record.stage)

    @property
    def ends_group(self) -> bool:
        return ends_group(self.record.stage)

    @property
    def hit(self) -> bool:
        """Return whether a different run computed it."""
        return self.record.run != self.run

    @property
    def lineage(self) -> dict[str, str]:
        """Return the digests of everything it was made from, by input name."""
        return lineage_of(self.inputs)

    @property
    def judges(self) -> str:
        return str(group(self.record.job, "human_eval").get("judges", "unknown"))

    @property
    def waived(self) -> dict[str, dict[str, str]]:
        """Return who waived each gate and why."""
        return {v.name: {"user": str(v.user), "reason": str(v.reason)} for v in self.verdicts if v.waived}

    @property
    def tags(self) -> dict[str, str]:
        """Return what it was made from and the code that computed it, as MLflow tags."""
        source = {"tether.source": digest_json(self.record.parts.get("source", {}))}
        return lineage_tags(self.lineage) | code_tags(self.record.environment.get("code", CodeVersion())) | source


def lineage_tags(lineage: Mapping[str, str]) -> dict[str, str]:
    """Return digests by input name as MLflow tags."""
    return {f"lineage.{name}_digest": digest for name, digest in lineage.items()}


def code_tags(code: CodeVersion) -> dict[str, str]:
    """Return a code version (`components.keys.code_version`) as MLflow tags. MLflow's pages show the commit."""
    tags = {"mlflow.source.git.commit": code.get("commit"), "tether.code_version": code.get("version")}
    if code.get("dirty") is not None:
        tags["tether.code_dirty"] = str(code["dirty"]).lower()
    return {name: value for name, value in tags.items() if value}


def current_user() -> str:
    """Return the user of this process, and the servers' user name if it differs, such as `ada as promoter`."""
    try:
        here = getpass.getuser()
    except (OSError, KeyError):  # a numeric user without a name, as in a container
        here = str(os.getuid())
    name, colon, _ = os.environ.get("PREFECT_API_AUTH_STRING", "").partition(":")
    there = os.environ.get("MLFLOW_TRACKING_USERNAME") or (name if colon else "")
    there = line(there)[:LONGEST_VALUE]
    return f"{here} as {there}" if there and there != here else here


def write_done(folder: Path, done: Done) -> None:
    """Write the result of a (sub-)stage for the run in `folder`; it replaces an earlier one."""
    make_folder(folder / "done")
    write_model(folder / "done" / f"{done.record.stage}.json", done)


def read_done(folder: Path) -> list[Done]:
    """Return the results of the (sub-)stages of the run in `folder`, oldest first.

    Raises:
        UserError: a result's file is damaged.
    """
    results, damaged = readable_done(folder)
    for error in damaged:
        raise error
    return results


def readable_done(folder: Path) -> tuple[list[Done], list[UserError]]:
    """Return the results whose files can be read, oldest first, and an error for each damaged file."""
    results, damaged = [], []
    for path in sorted((folder / "done").glob("[!.]*.json")):
        try:
            results.append(Done.model_validate_json(read_regular(path)))
        except (OSError, ValueError) as error:
            damaged.append(
                UserError(
                    f"{path} is damaged ({_first_line(error)}). Restore the file, or remove it: MLflow then gets "
                    "no results of that stage."
                )
            )
    return sorted(results, key=lambda result: result.time), damaged


def recorded_inputs(home: Path, runs: Iterable[str]) -> dict[str, Input]:
    """Return the external inputs of `runs`, by digest; the last run by id decides. Unreadable files are logged."""
    sources: dict[str, Input] = {}
    for run in sorted(runs):
        readable, damaged = readable_done(home / "runs" / run)
        for error in damaged:
            logger.warning("%s", error)
        sources |= {source.digest: source for done in readable for source in done.inputs if not source.stage}
    return sources


class Sent(BaseModel):
    """What MLflow has of a run's folder, and the ids there. A folder without this file is not sent to MLflow."""

    project: str = ""
    """The experiment's name."""
    code: dict[str, str] = Field(default_factory=dict)
    """The code that began the run (`code_tags`)."""
    experiment: str | None = None
    parent: str | None = None
    stages: dict[str, str] = Field(default_factory=dict)
    """Maps a stage to the id of its MLflow run."""
    states: dict[str, str] = Field(default_factory=dict)
    """Maps a stage to its state and the names of its failed gates; the empty name is the run itself."""
    points: dict[str, int] = Field(default_factory=dict)
    """Maps a stage to the bytes of its points file that were sent."""
    done: dict[str, int] = Field(default_factory=dict)
    """Maps a (sub-)stage to the time of its result."""
    decision: str = ""
    """What the registry decided about the policy's aliases, in one sentence; empty before."""
    whole: str = ""
    """`updated` of the final run.json that was sent completely; empty before."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the state of the run in `folder` (without a file: nothing sent).

        If the file is damaged, only the project is known. What MLflow has is then looked up there, so nothing is sent
        twice.
        """
        path = folder / SENT
        if not path.is_file():
            return cls()
        try:
            return cls.model_validate_json(read_regular(path))
        except (OSError, ValueError) as error:
            logger.warning("%s is damaged (%s): MLflow is asked what it has of this run", path, _first_line(error))
            project: object = ""
            with suppress(UserError):  # reported when the config is needed
                project = run_values(folder.parent.parent, folder.name).get("project", "")
            return cls(project=str(project))

    def save(self, folder: Path) -> None:
        write_model(folder / SENT, self)


def write_model(path: Path, model: BaseModel) -> None:
    """Write `model` to `path` as JSON, replacing the file in one step."""
    write_whole(path, model.model_dump_json(indent=1))


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
