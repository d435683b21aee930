"""A run's state as one JSON file, `runs/<run>/run.json`, replaced in one step at every change.

Nothing else reads or writes that file. `StatusFile` is for the run that this process computes; `RunStatus` is any run
in the form for readers.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from components.base.errors import TetherError, UserError
from components.base.files import make_folder
from components.base.paths import read_regular
from components.base.process import Process, is_alive, this_process
from components.gates.judging import Verdict, Waiver
from components.gates.renamed import present_metrics
from tasks.result import State
from tasks.runs.explained import Explanation
from tasks.runs.journal import Sent, current_user, write_model
from tasks.runs.points import points_file, read_points
from tasks.runs.run_label import UNNAMED, Label
from tasks.runs.schema import RUN_SCHEMA, check_run

logger = logging.getLogger(__name__)

WORST_FIRST: tuple[State, ...] = get_args(State)
RUN_FILE = "run.json"


def worst(states: Iterable[State]) -> State:
    """Return the worst of some states; `not_run` if there are none."""
    return min(states, key=WORST_FIRST.index, default="not_run")


def _stamp(text: str) -> str:
    """Raise ValueError if a text is not a plausible time of a run; empty is allowed."""
    if text and not 1970 <= datetime.fromisoformat(text).year < 9000:
        raise ValueError("its year is before 1970 or after 8999")
    return text


Stamp = Annotated[str, AfterValidator(_stamp)]
"""ISO 8601, UTC."""


class Part(BaseModel):
    """A sub-stage's result in a run."""

    key: str
    digest: str | None = None


class StageStatus(BaseModel):
    """One stage of a run."""

    # long: record on disk, one field for each entry of a stage in run.json
    model_config = ConfigDict(extra="allow", validate_assignment=True)

    name: str
    state: State = "not_run"
    seconds: float = 0.0
    started: float | None = None
    """When it first began, in seconds since 1970."""
    began: float | None = None
    """When it last began or was continued."""
    pool: str = ""
    """The work pool that computes it; empty for the process of the run."""
    price: float | None = None
    """Price per hour of what computes it, in the run's currency; None without a price."""
    computed: dict[str, float] = Field(default_factory=dict)
    """Seconds that its (sub-)stages computed for this run, in all attempts; waiting for a pool does not count."""
    reused: dict[str, float] = Field(default_factory=dict)
    """Seconds that it took to compute the results which this run found in the store."""
    cached: bool = False
    key: str | None = None
    digest: str | None = None
    user: str = ""
    """The user who had it computed or scored in this run."""
    mlflow_run: str | None = None
    """The id of its MLflow run; None until MLflow has it."""
    prefect: str = ""
    """The address of its page on a Prefect server; empty if it has none."""
    metrics: Annotated[dict[str, float | None], AfterValidator(present_metrics)] = Field(default_factory=dict)
    """None for a metric that is not finite."""
    gates: list[Verdict] = Field(default_factory=list)
    explained: dict[str, Explanation] = Field(default_factory=dict)
    """Why each (sub-)stage was computed or reused; empty if it was not looked up."""
    parts: dict[str, Part] = Field(default_factory=dict)
    """Keys and digests of its sub-stages."""

    @property
    def cost(self) -> float | None:
        """Return the cost of computing it, in the run's currency; None if it has no price or did not begin."""
        return self._priced(self.computed)

    @property
    def saved(self) -> float | None:
        """Return what recomputing its reused results would have cost at this price; None in the same cases as
        `cost`."""
        return self._priced(self.reused)

    def _priced(self, seconds: Mapping[str, float]) -> float | None:
        began = self.started is not None
        return math.fsum(seconds.values()) / 3600 * self.price if began and self.price is not None else None

    def count(self, seconds: float) -> None:
        """Add the seconds of an attempt that has no recorded end: it is running, or its process was killed."""
        self.seconds += seconds
        if not self.pool:
            self.computed = {**self.computed, self.name: self.computed.get(self.name, 0.0) + seconds}

    @property
    def results(self) -> list[str]:
        """Return the keys and digests of the run's results for this stage."""
        names = (self.key, self.digest, *(name for part in self.parts.values() for name in (part.key, part.digest)))
        return list(dict.fromkeys(name for name in names if name))

    @property
    def waivers(self) -> list[Waiver]:
        """Return the waivers that let gates of this stage pass."""
        waived = [gate for gate in self.gates if gate.waived]
        return [Waiver(gate=gate.name, user=gate.user or "", reason=gate.reason or "unknown") for gate in waived]


class RunFile(BaseModel):
    """The content of run.json."""

    # long: record on disk, one field for each entry of run.json
    model_config = ConfigDict(extra="allow")  # fields of a later version survive reading and writing

    run: str
    profile: str
    name: str = ""
    """The user's name for it."""
    tags: dict[str, str] = Field(default_factory=dict)
    """The user's tags; a bare tag has an empty value."""
    user: str = ""
    """The user who started it."""
    started: Annotated[Stamp, Field(min_length=1)]
    currency: str = ""
    """Currency of the stages' costs."""
    origin: dict[str, str] = Field(default_factory=dict)
    """What began it. `flow_run`: its Prefect flow run. For a rerun `stage`, and `from`, the earlier run. For a round of
    `tether iterate` its number, `round`, and `votes`, the run whose policy people judged last. `until`: its last
    stage. `method`: `policy.method`, if it is not `ppo`."""
    prefect: str = ""
    """The address of its flow run's page on a Prefect server; empty if it has none."""
    stages: list[StageStatus]
    schema_version: int = RUN_SCHEMA
    """The file's format (`tasks/runs/schema.py`)."""
    finished: Stamp | None
    updated: Stamp = ""
    process: Process
    """The process that computes it, or computed it last."""

    @property
    def died(self) -> bool:
        """Return whether its process was killed before it recorded the run's end."""
        return self.finished is None and not is_alive(self.process)

    @property
    def label(self) -> Label:
        return Label(self.name, self.tags)

    @property
    def until(self) -> str:
        """Return the last stage that the run was asked to compute; empty if it was to compute all."""
        return self.origin.get("until", "")

    @property
    def cost(self) -> float | None:
        """Return the cost of its stages so far, in `currency`; None if no stage has a price."""
        return _sum(stage.cost for stage in self.stages)

    @property
    def saved(self) -> float | None:
        """Return what its reused results would have cost; None in the same cases as `cost`."""
        return _sum(stage.saved for stage in self.stages)

    def title(self, stage: str) -> str:
        """Return how views name a stage: the policy's with its method, if that is not PPO."""
        return f"{stage} ({self.origin['method']})" if stage == "ppo" and "method" in self.origin else stage

    def stage(self, name: str) -> StageStatus:
        """Return the stage `name`. Raises TetherError if the run has no such stage."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise TetherError(f"this run has no stage {name}")


def _sum(costs: Iterable[float | None]) -> float | None:
    terms = [cost for cost in costs if cost is not None]
    return math.fsum(terms) if terms else None


class RunStatus(RunFile):
    """A run in the form for readers. If its process died, it is `interrupted`."""

    state: State
    seconds: float

    @property
    def metrics(self) -> dict[str, float | None]:
        """Return the final metrics of all stages."""
        return {name: value for stage in self.stages for name, value in stage.metrics.items()}

    @property
    def results(self) -> list[str]:
        """Return the keys and digests of the run's results."""
        return [name for stage in self.stages for name in stage.results]

    @property
    def waivers(self) -> list[Waiver]:
        """Return the waivers that let gates of this run pass."""
        return [waiver for stage in self.stages for waiver in stage.waivers]

    def as_json(self) -> dict[str, object]:
        """Return exactly what `tether status --json` prints; `until` and costs only if the run has them."""
        stages = self.model_dump(mode="json", include={"stages": {"__all__": _STAGE_FIELDS}})["stages"]
        for stage, entry in zip(self.stages, stages, strict=True):
            entry["gates"] = gates_json(stage.gates)
            if stage.cost is not None:
                entry |= {"cost": stage.cost, "saved": stage.saved}
        summary = self.model_dump(mode="json", include={"run", "profile", "state", "seconds"})
        priced = {"cost": self.cost, "saved": self.saved, "currency": self.currency} if self.cost is not None else {}
        ends = {"until": self.until} if self.until else {}
        return {**summary, **ends, **priced, "stages": stages}

    def explanations(self) -> dict[str, object]:
        """Return what `tether status --why --json` prints: `{run, origin, stages: [{name, state, explained}]}`."""
        fields = {"run": True, "origin": True, "stages": {"__all__": {"name", "state", "explained"}}}
        return self.model_dump(mode="json", include=fields)  # type: ignore[arg-type]


def gates_json(verdicts: Iterable[Verdict]) -> list[dict[str, object]]:
    """Return verdicts as `tether status --json` prints them. A gate that is off has threshold null; a second bound
    (such as what chance gives) is in `within`."""
    return [
        verdict.model_dump(mode="json", include=_GATE_FIELDS | ({"within"} if verdict.within is not None else set()))
        for verdict in verdicts
    ]


_STAGE_FIELDS = {"name", "state", "seconds", "cached", "key", "digest", "mlflow_run", "metrics", "gates"}
_GATE_FIELDS = {"name", "metric", "value", "op", "threshold", "passed", "waived"}


class StatusFile:
    """The run.json of the run that this process computes."""

    def __init__(self, folder: Path, document: RunFile) -> None:
        self.folder, self.document = folder, document
        self._lock = threading.Lock()
        make_folder(folder)
        self._write()

    @classmethod
    def start(
        cls, folder: Path, run: str, profile: str, stages: Sequence[str], origin: Mapping[str, str] | None = None,
        label: Label = UNNAMED, currency: str = "", user: str | None = None,
    ) -> "StatusFile":  # fmt: skip
        """Begin a new run with every stage `not_run`. Arguments as in `RunFile`; `user` None means this process's
        user."""
        document = RunFile(
            run=run,
            name=label.name,
            tags=dict(label.tags),
            user=user or current_user(),
            profile=profile,
            currency=currency,
            started=_now(),
            finished=None,
            process=this_process(),
            origin=dict(origin or {}),
            stages=[StageStatus(name=name) for name in stages],
        )
        return cls(folder, document)

    @classmethod
    def resume(cls, folder: Path) -> "StatusFile":
        """Continue a run that has ended in this process, to score people's labels."""
        document = read_file(folder)
        if document.died:
            _count_killed(folder, document.stages, document.updated)
        return cls(folder, document.model_copy(update={"finished": None, "process": this_process()}))

    @property
    def state(self) -> State:
        return worst(stage.state for stage in self.document.stages)

    @property
    def begun(self) -> list[str]:
        return [stage.name for stage in self.document.stages if stage.started is not None]

    def stage(self, name: str) -> StageStatus:
        return self.document.stage(name).model_copy()

    def update(self, name: str, **fields: Any) -> None:
        """Change fields of one stage's entry, and replace the file."""
        with self._lock:
            entry = self.document.stage(name)
            for field, value in fields.items():
                setattr(entry, field, value)
            self._write()

    def name_page(self, address: str) -> None:
        """Record the address of the run's page on a Prefect server."""
        with self._lock:
            self.document.prefect = address
            self._write()

    def begin(self, name: str, pool: str = "", price: float | None = None, user: str = "") -> None:
        """Record that a stage begins or resumes; other arguments as in `StageStatus`."""
        now, started = time.time(), self.stage(name).started
        self.update(name, state="running", began=now, started=started or now, pool=pool, price=price, user=user)

    def add_computed(self, name: str, part: str, seconds: float) -> None:
        """Record that the (sub-)stage `part` of the stage `name` has computed for `seconds` more."""
        computed = self.stage(name).computed
        self.update(name, computed={**computed, part: computed.get(part, 0.0) + seconds})

    def finish(self, stopped: State = "interrupted") -> State:
        """End the run and return its state. `stopped` is the state of the next stage if it was stopped between
        stages."""
        with self._lock:
            _interrupt(self.document.stages, stopped)
            self.document.finished = _now()
            self._write()
        return self.state

    def _write(self) -> None:
        self.document.updated = _now()
        write_model(self.folder / RUN_FILE, self.document)


def load_status(home: Path, run_id: str | None = None) -> RunStatus:
    """Return a run's status; None means the newest readable run.

    Raises:
        UserError: there is no such run, or its file is damaged.
    """
    if run_id is None:
        runs = list_runs(home)
        if not runs:
            raise UserError(f"there is no run in {home / 'runs'} yet; start one with `tether run demo`.")
        run_id = runs[0]
    folder = run_folder(home, run_id)
    return _status(read_file(folder), Sent.load(folder).stages, folder)


def run_folder(home: Path, run: str) -> Path:
    """Return the folder of a run. Raises UserError if there is no such run."""
    if not has_run(home, run):
        called = [status.run for status in load_readable(home)[0] if status.name == run]
        advice = f"Runs of that name: {', '.join(called)}. Give an id" if called else "`tether runs` lists their ids"
        raise UserError(f"there is no run {run} in {home / 'runs'}. {advice}.")
    return home / "runs" / run


def load_readable(home: Path) -> tuple[list[RunStatus], dict[str, float]]:
    """Return every readable run's status, newest first, and for each damaged run the time its file was written."""
    files, errors = _files(home)
    damaged = {}
    for run in errors:
        with suppress(FileNotFoundError):  # discarded in the meantime
            damaged[run] = (home / "runs" / run / RUN_FILE).stat().st_mtime
    return [_status(document, {}, home / "runs" / document.run) for document in files], damaged


def list_runs(home: Path) -> list[str]:
    """Return every run's id, newest first; commands without a run use the first. Runs that can't be read are logged."""
    documents, damaged = _files(home)
    for error in damaged.values():
        logger.warning("%s It is left out.", error)
    return [document.run for document in documents]


def has_run(home: Path, run: str) -> bool:
    return bool(run) and "/" not in run and not run.startswith(".") and (home / "runs" / run / RUN_FILE).is_file()


def run_of_flow(home: Path, flow_run: str) -> str | None:
    """Return the run that a Prefect flow run began, if Prefect retries it; None on its first attempt."""
    return next((document.run for document in _files(home)[0] if document.origin.get("flow_run") == flow_run), None)


def read_file(folder: Path) -> RunFile:
    """Return the run.json in `folder`. Raises UserError if this version of Tether can't read it."""
    try:
        data = read_regular(folder / RUN_FILE)
        check_run(folder / RUN_FILE, data)
        document = RunFile.model_validate_json(data)
        if document.run != folder.name:
            raise ValueError(f"it is that of run {document.run}")
        return document
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder / RUN_FILE} is damaged ({str(error).splitlines()[0]}). Restore the file, or move the folder "
            f"{folder} out of {folder.parent}."
        ) from error


def end_elsewhere(folder: Path) -> None:
    """Mark a run that was running when it was copied as killed; leave other runs unchanged."""
    document = read_file(folder)
    if document.finished is None:
        process: Process = {**document.process, "host": socket.gethostname(), "boot": "before it was restored"}
        write_model(folder / RUN_FILE, document.model_copy(update={"process": process}))


def finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Return metrics for JSON: None for a value that is not finite."""
    return {name: value if math.isfinite(value) else None for name, value in metrics.items()}


def _status(document: RunFile, in_mlflow: Mapping[str, str], folder: Path) -> RunStatus:
    running = document.finished is None and not document.died
    stages = [stage.model_copy() for stage in document.stages]
    if document.died:
        _count_killed(folder, stages, document.updated)
        _interrupt(stages)
    for stage in stages:
        if running and stage.state == "running" and stage.began is not None:
            stage.count(time.time() - stage.began)
        stage.seconds = round(stage.seconds, 3)
        stage.mlflow_run = in_mlflow.get(stage.name, stage.mlflow_run)
    extra: list[State] = ["interrupted"] if document.died else ["running"] if running else []
    end = _seconds(_now() if running else document.finished or document.updated or document.started)
    state, seconds = worst([*extra, *(stage.state for stage in stages)]), round(end - _seconds(document.started), 3)
    return RunStatus.model_validate(dict(document) | {"state": state, "seconds": seconds, "stages": stages})


def _count_killed(folder: Path, stages: Sequence[StageStatus], updated: str) -> None:
    """Count the seconds of the stage whose process was killed, up to its last sign of life: a point, or its status."""
    for stage in stages:
        if stage.state == "running" and stage.began is not None:
            times = [point["time"] / 1000 for point in read_points(points_file(folder, stage.name))]
            stage.count(max(0.0, *times, _seconds(updated) if updated else 0.0, stage.began) - stage.began)


def _interrupt(stages: Sequence[StageStatus], stopped: State = "interrupted") -> None:
    """Mark where an ended run was stopped: the running stage, or otherwise the first stage that did not begin."""
    for stage in stages:
        if stage.state == "running":
            stage.state = "interrupted"
    if all(stage.state in _FINE for stage in stages):
        for stage in [stage for stage in stages if stage.state == "not_run"][:1]:
            stage.state = stopped


_FINE = {"passed", "cached", "waived", "skipped", "not_run"}
"""States that do not explain why a run ended before its last stage."""


def _files(home: Path) -> tuple[list[RunFile], dict[str, UserError]]:
    """Return every readable run's file, newest first, and an error for each of the others, by run."""
    documents, damaged = [], {}
    for path in (home / "runs").glob(f"*/{RUN_FILE}"):
        try:
            documents.append(read_file(path.parent))
        except FileNotFoundError:
            continue  # discarded in the meantime
        except UserError as error:
            damaged[path.parent.name] = error
    return sorted(documents, key=lambda document: document.started, reverse=True), damaged


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()
