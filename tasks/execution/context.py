"""What the stages of one pipeline run share: home, store, gates, status file, tracking, and where to print."""

import secrets
import shutil
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from tasks.execution import logs, progress
from tasks.execution.attempts import Attempts
from tasks.result import StageResult, State
from tasks.runs.config import run_values, write_values
from tasks.runs.journal import current_user
from tasks.runs.label import UNNAMED, Label
from tasks.runs.schema import mark_home
from tasks.runs.status import StatusFile, run_folder
from tasks.stages import PIPELINE, STAGES
from tasks.tracking.carrier import Tracker


@dataclass
class RunContext:
    """One pipeline run in this process; use as a context, so that its end is written down whatever happens."""

    home: Path
    run: str
    gates: GatesConfig
    status: StatusFile
    store: ArtifactStore
    profile: str = ""
    project: str = "tether"
    config: Mapping[str, JsonValue] = field(default_factory=dict)
    """The whole run's config, for people to read; keys are made of each stage's job."""
    waivers: Sequence[Waiver] = ()
    refresh: frozenset[str] = frozenset()
    """Stages (or sub-stages) to compute even where the store has them."""
    pinned: Mapping[str, Record] = field(default_factory=dict)
    """Records to take for (sub-)stages whose inputs are still the same, though code or machine may have changed."""
    until: str = ""
    """The pipeline's stage that the run ends after; empty where it goes on to the last."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """Shown stage to the work pool that computes it; what isn't named is computed by this process."""
    attempts: Attempts = field(default_factory=Attempts)
    """How often a stage is tried again after a breakdown."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    """Shown stage to the seconds that one attempt may take; what isn't named has no limit."""
    prices: Mapping[str, float] = field(default_factory=dict)
    """Shown stage to the price of an hour of what computes it; what isn't named has none."""
    currency: str = ""
    """Of the prices."""
    root: Path = ROOT
    """Where our packages are."""
    track: bool = True
    console: Console = field(default_factory=progress.output)
    results: dict[str, StageResult] = field(default_factory=dict)
    """What each (sub-)stage gave so far, those that a gate stopped included."""
    at_end: "Callable[[RunContext], None] | None" = None
    """Called once, when the run's end is written down and before MLflow is told of it."""
    log: Callable[[str], None] | None = None
    """Takes what is said, beside the console."""
    show_samples: Callable[[str, Mapping[str, Any]], None] | None = None
    """Takes a stage and a point of it with samples, while the stage computes."""
    user: str = field(default_factory=current_user)
    """Who has these stages computed, or scored, for the record."""
    flow_run: str = ""
    """The id of the Prefect flow run that has the run's pages; none on an embedded server, which ends with the run."""
    _tracker: Tracker | None = None

    def __post_init__(self) -> None:
        logs.bind(run=self.run, flow_run=self.flow_run or None)

    @classmethod
    def start(
        cls,
        home: Path,
        profile: str,
        gates: GatesConfig,
        *,
        config: Mapping[str, JsonValue] | None = None,
        waivers: Sequence[Waiver] = (),
        stages: Sequence[str] = PIPELINE,
        run: str | None = None,
        origin: Mapping[str, str] | None = None,
        label: Label = UNNAMED,
        **options: Any,
    ) -> "RunContext":
        """Begin a run: its folder, its config and its status file. MLflow is not touched yet.

        Args:
            config: the run's config as JSON, kept as `config.yaml`.
            stages: what the status shows, in order.
            run: the run's id; None makes one that sorts by time.
            origin: what began it, for the status file.
            options: further fields of this class.

        Raises:
            UserError: a waiver names no gate.
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
        # Before the status, which makes it a run: one that dies in between must not be a run without a config.
        write_values(folder, config or {})
        about = {name: options[name] for name in ("currency", "user") if name in options}
        status = StatusFile.start(folder, run, profile, stages, origin, label, **about)
        return cls(home, run, gates, status, store, profile, config=config or {}, waivers=waivers, **options)

    @classmethod
    def resume(
        cls, home: Path, run: str, gates: GatesConfig, *, waivers: Sequence[Waiver] = (), **options: Any
    ) -> "RunContext":
        """Take up a run that ended, under its id. Raises UserError if there is none, or a waiver names no gate."""
        check_waivers(waivers, gates)
        status, config = StatusFile.resume(run_folder(home, run)), run_values(home, run)
        return cls(home, run, gates, status, ArtifactStore(home), config=config, waivers=waivers, **options)

    def __enter__(self) -> "RunContext":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # nothing stopped it
            self.finish("not_run")
        else:
            self.finish("failed" if issubclass(kind, Exception) else "interrupted")

    @property
    def folder(self) -> Path:
        """`runs/<run>/`."""
        return self.home / "runs" / self.run

    def say(self, text: str) -> None:
        """Print one line for the user."""
        progress.say(self.console, text)
        if self.log is not None:
            self.log(text)

    def tracker(self) -> Tracker | None:
        """Return what carries this run to MLflow, begun at the first call; None where tracking is off."""
        if self.track and self._tracker is None:
            self._tracker = Tracker(self.home, self.run)
            self._tracker.open(self.project)
        return self._tracker

    def begin_stage(self, stage: str) -> None:
        """Write into the status that a stage begins; MLflow gets it from there.

        Raises:
            Interrupted: nobody reads what the run prints any more.
        """
        if lost := getattr(self.console, "lost", ""):
            raise Interrupted(signal.SIGPIPE, f"what it prints can't be written ({lost})")
        self.status.begin(stage, self.pools.get(stage, ""), self.prices.get(stage), self.user)
        if tracker := self.tracker():
            tracker.nudge()

    def end_stage(self, stage: str, state: State, **fields: Any) -> None:
        """Write into the status how a stage ended; MLflow gets it from there."""
        self.status.update(stage, state=state, **fields)
        if self._tracker:
            self._tracker.nudge()

    def discard(self) -> None:
        """Leave nothing of a run that has not begun; one taken up again stays as it was."""
        if self.status.state == "not_run":
            shutil.rmtree(self.folder)

    def finish(self, stopped: State = "interrupted") -> None:
        """End the run, and let MLflow have the rest of it; called twice it does nothing more.

        `stopped` is the state of the stage before which the run was cut off, if it was cut off between two.
        """
        self.status.finish(stopped)
        at_end, self.at_end = self.at_end, None
        if self._tracker is not None:  # the report links to the pages there
            self._tracker.settle(self.status.begun)
        try:
            if at_end is not None:
                at_end(self)
        finally:
            tracker, self._tracker, self.track = self._tracker, None, False
            if tracker is not None and not tracker.close():
                self.say("MLflow does not have all of this run yet. The next run or `tether sync` sends the rest.")


def new_run_id() -> str:
    """Return an id that sorts by time and says when."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def refreshed(stages: Iterable[str]) -> frozenset[str]:
    """Stages to compute again, sub-stages included (`human_eval` means its sample too)."""
    wanted = set(stages)
    return frozenset(stage.name for stage in STAGES.values() if stage.shown in wanted or stage.name in wanted)
