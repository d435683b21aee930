"""The state that the stages of one run share: home, store, gates, status file, tracking and console."""

import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from rich.console import Console

from components.base.files import make_folder, sweep
from components.gates.judging import GatesConfig, Waiver, check_waivers
from components.keys.fingerprint import ROOT
from components.store.retention import remove_finished_work
from components.store.store import ArtifactStore, Record
from components.training.stopping import Interrupted
from tasks.execution import logs, stage_progress
from tasks.execution.attempts import Attempts
from tasks.result import StageResult, State
from tasks.runs.config import PROFILE, write_values
from tasks.runs.journal import current_user
from tasks.runs.run_label import UNNAMED, Label
from tasks.runs.schema import mark_home
from tasks.runs.status import StatusFile, run_folder
from tasks.stages import ALWAYS, STAGES
from tasks.tracking.mlflow_sync import Tracker


@dataclass(frozen=True)
class Execution:
    """Where and how stages are computed. The maps' keys are the pipeline's stages."""

    pools: Mapping[str, str] = field(default_factory=dict)
    """The work pools that compute stages; the run's process computes the others."""
    attempts: Attempts = field(default_factory=Attempts)
    """How often a stage is retried after a breakdown."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    """The seconds that one attempt may take; other stages have no limit."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """The prices per hour; other stages have no price."""
    currency: str = ""
    """Currency of `prices`."""
    root: Path = ROOT
    """The folder that holds Tether's packages."""


@dataclass(frozen=True)
class Reuse:
    """Which stored results a run may use."""

    refresh: frozenset[str] = frozenset()
    """Stages (or sub-stages) to recompute even if the store has a result."""
    pinned: Mapping[str, Record] = field(default_factory=dict)
    """Records to reuse for (sub-)stages whose inputs are unchanged, even if code or machine have changed."""


@dataclass(frozen=True)
class Reporting:
    """Where a run is shown: in MLflow, on the console, and on the pages of a Prefect flow run."""

    project: str = "tether"
    track: bool = True
    console: Console = field(default_factory=stage_progress.output)
    at_end: "Callable[[RunContext], None] | None" = None
    """Called once, after the run's end is recorded and before MLflow gets it."""
    log: Callable[[str], None] | None = None
    """Gets every line that the console gets."""
    flow_run: str = ""
    """The id of the Prefect flow run with the run's pages; empty on an embedded server, which ends with the run."""


IN_PROCESS, NO_PINS = Execution(), Reuse()


@dataclass
class RunContext:
    """One pipeline run in this process. Use it as a context manager, so that its end is always recorded."""

    home: Path
    run: str
    gates: GatesConfig
    status: StatusFile
    store: ArtifactStore
    waivers: Sequence[Waiver]
    user: str
    """The user who has these stages computed or scored, for the record."""
    reuse: Reuse
    execution: Execution
    reporting: Reporting
    results: dict[str, StageResult] = field(default_factory=dict)
    """The result of each (sub-)stage so far, including those that a gate stopped."""
    _tracker: Tracker | None = None

    def __post_init__(self) -> None:
        logs.bind(run=self.run, flow_run=None)

    @classmethod
    def start(
        cls, home: Path, profile: str, gates: GatesConfig, *, config: Mapping[str, JsonValue] | None = None,
        profile_values: Mapping[str, JsonValue] | None = None, waivers: Sequence[Waiver] = (),
        stages: Sequence[str] = ALWAYS, run: str | None = None, origin: Mapping[str, str] | None = None,
        label: Label = UNNAMED, user: str | None = None,
        reuse: Reuse = NO_PINS, execution: Execution = IN_PROCESS, reporting: Reporting | None = None,
    ) -> "RunContext":  # fmt: skip
        """Begin a run: create its folder, config and status file. MLflow is not used yet.

        Args:
            config: the run's whole config, stored for people to read; keys are made from each stage's job.
            profile_values: the values of a profile that is not built in, stored as `profile.yaml`.
            stages: the stages in the status, in order.
            run: the run's id; None makes one that sorts by time.
            origin: what began the run, for the status file.
            user: None is the user of this process.
            reporting: None is a console and MLflow.

        Raises:
            UserError: a waiver names an unknown gate.
        """
        check_waivers(waivers, gates)
        run = run or new_run_id()
        folder = home / "runs" / run
        store = ArtifactStore(home)
        for part in ("runs", "store", "work"):
            sweep(home / part)
        remove_finished_work(store)
        mark_home(home)
        make_folder(folder)
        # Before the status file, which makes the folder a run: a run that dies in between must not lack its config.
        write_values(folder, config or {})
        if profile_values is not None:
            write_values(folder, profile_values, PROFILE)
        user = user or current_user()
        status = StatusFile.start(folder, run, profile, stages, origin, label, execution.currency, user)
        return cls(home, run, gates, status, store, waivers, user, reuse, execution, reporting or Reporting())

    @classmethod
    def resume(
        cls, home: Path, run: str, gates: GatesConfig, waivers: Sequence[Waiver] = (), user: str | None = None,
        reuse: Reuse = NO_PINS, execution: Execution = IN_PROCESS, reporting: Reporting | None = None,
    ) -> "RunContext":  # fmt: skip
        """Continue a run that has ended, under its id. Raises UserError if there is none or a waiver names no gate."""
        check_waivers(waivers, gates)
        status, user = StatusFile.resume(run_folder(home, run)), user or current_user()
        reporting = reporting or Reporting()
        return cls(home, run, gates, status, ArtifactStore(home), waivers, user, reuse, execution, reporting)

    def __enter__(self) -> "RunContext":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # nothing stopped it
            self.finish("not_run")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")

    @property
    def folder(self) -> Path:
        return self.home / "runs" / self.run

    def say(self, text: str) -> None:
        stage_progress.say(self.reporting.console, text)
        if self.reporting.log is not None:
            self.reporting.log(text)

    def tracker(self) -> Tracker | None:
        """Return what sends this run to MLflow, created on the first call; None if tracking is off."""
        if self.reporting.track and self._tracker is None:
            self._tracker = Tracker(self.home, self.run, self.reporting.project)
        return self._tracker

    def begin_stage(self, stage: str) -> None:
        """Record in the status that a stage begins; MLflow gets it from there.

        Raises:
            Interrupted: the run's output can no longer be written.
        """
        if lost := getattr(self.reporting.console, "lost", ""):
            raise Interrupted(signal.SIGPIPE, f"what it prints can't be written ({lost})")
        pool, price = self.execution.pools.get(stage, ""), self.execution.prices.get(stage)
        self.status.begin(stage, pool, price, self.user)
        if tracker := self.tracker():
            tracker.notify()

    def end_stage(self, stage: str, state: State, **fields: Any) -> None:
        """Record in the status how a stage ended; MLflow gets it from there."""
        self.status.update(stage, state=state, **fields)
        if self._tracker:
            self._tracker.notify()

    def discard(self) -> None:
        """Remove a run that has not begun; a continued run stays as it was."""
        if self.status.state == "not_run":
            shutil.rmtree(self.folder)

    def finish(self, stopped: State = "interrupted") -> None:
        """End the run, and send MLflow the rest of it. A second call does nothing.

        `stopped` is the state of the next stage if the run was stopped between two stages.
        """
        self.status.finish(stopped)
        at_end = self.reporting.at_end
        self.reporting = replace(self.reporting, track=False, at_end=None)
        if self._tracker is not None:  # the report links to its pages
            self._tracker.settle(self.status.begun)
        try:
            if at_end is not None:
                at_end(self)
        finally:
            tracker, self._tracker = self._tracker, None
            if tracker is not None and not tracker.close():
                self.say("MLflow does not have all of this run yet. The next run or `tether sync` sends the rest.")


def new_run_id() -> str:
    """Return an id that sorts by time and shows the time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def refreshed(stages: Iterable[str]) -> frozenset[str]:
    """Return the stages to recompute with their sub-stages (`human_eval` includes its sample)."""
    wanted = set(stages)
    return frozenset(stage.name for stage in STAGES.values() if stage.group in wanted or stage.name in wanted)
