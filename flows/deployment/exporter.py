"""Export the runs of a home to Prometheus: what each stage is doing, its newest metrics, its gates, and how runs ended.

Everything is read from the home's files when Prometheus asks, so runs need not know of it, and one exporter serves all
workers that share the home. With a Prefect server it also counts the runs in the queues of the work pools.
"""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from components.base.errors import UserError
from components.base.process import is_dead
from components.training.stopping import graceful
from tasks.runs.points import Point, points_after, points_file
from tasks.runs.status import WORST_FIRST, RunStatus, StageStatus, load_readable, read_file, run_folder

RECENT_SECONDS = 3600.0
"""How long a run is still exported in detail after its end."""
PACE_SECONDS = 60.0
"""Tokens per second are measured over this many seconds before the newest point."""
STAGE = ("run", "profile", "stage")


class Queued(NamedTuple):
    """The number of our flow runs in one state in one queue of a work pool."""

    pool: str
    queue: str
    state: str
    runs: int


class Curve:
    """The points of a stage. Each read continues after the last one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._paced: list[tuple[float, float]] = []
        self.latest: dict[str, float] = {}
        """The newest value of each metric."""
        self.step = 0
        self.total: float | None = None
        """Number of steps of the whole stage, if known."""
        self.time = 0.0
        """Time of the newest point, in seconds since 1970; 0 if there is none."""

    def read(self) -> None:
        """Read the points that were added since the last call."""
        points, self._offset = points_after(self._path, self._offset)
        for point in points:
            self._add(point)

    def _add(self, point: Point) -> None:
        self.step, self.time = max(self.step, point["step"]), point["time"] / 1000
        self.total = point.get("total", self.total)
        self.latest |= point["metrics"]
        if "tokens" in point:
            self._paced.append((self.time, float(point["tokens"])))
            self._paced = [each for each in self._paced if each[0] >= self.time - PACE_SECONDS]

    @property
    def tokens_per_second(self) -> float | None:
        """Return the rate over the last `PACE_SECONDS` before the newest point; None with fewer than two points."""
        if len(self._paced) < 2:
            return None
        seconds = self._paced[-1][0] - self._paced[0][0]
        return sum(tokens for _, tokens in self._paced[1:]) / seconds if seconds > 0 else None


class _Families:
    """The metrics of one response, by name, each with its help text and labels."""

    def __init__(self) -> None:
        self._found: dict[str, GaugeMetricFamily] = {}

    def add(self, name: str, text: str, labels: Mapping[str, str], value: float) -> None:
        """Add a sample of the gauge `tether_<name>`."""
        family = self._found.setdefault(name, GaugeMetricFamily(f"tether_{name}", text, labels=list(labels)))
        family.add_metric(list(labels.values()), value)

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._found.values())


class RunCollector(Collector):
    """Collects running runs and those that ended within the last hour in detail, and all runs as counts by state."""

    def __init__(self, home: Path, queues: Callable[[], Iterable[Queued]] | None = None) -> None:
        """`queues` asks a Prefect server, and raises if it does not answer; None if there is no server."""
        self._home = home
        self._queues = queues
        self._curves: dict[Path, Curve] = {}
        self._lock = threading.Lock()  # each request runs in its own thread

    def collect(self) -> Iterator[Metric]:
        """Return all current samples."""
        with self._lock:
            return iter(list(self._families()))

    def describe(self) -> Iterator[Metric]:
        """Return nothing, because the metrics depend on the runs and are not known at registration."""
        return iter(())

    def _families(self) -> _Families:
        out = _Families()
        free = shutil.disk_usage(self._home).free
        out.add("home_free_bytes", "Free space of the disk that holds the home.", {"home": str(self._home)}, free)
        readable, damaged = load_readable(self._home)
        states = Counter(each.state for each in readable)
        for state in WORST_FIRST:
            out.add("runs", "Runs of the home.", {"state": state}, states[state])
        out.add("runs", "Runs of the home.", {"state": "damaged"}, len(damaged))
        shown = [each for each in readable if self._is_recent(each)]
        for run in shown:
            self._run(out, run)
        folders = {run_folder(self._home, run.run) for run in shown}
        self._curves = {path: curve for path, curve in self._curves.items() if path.parents[1] in folders}
        self._prefect(out)
        return out

    def _is_recent(self, run: RunStatus) -> bool:
        written = (run_folder(self._home, run.run) / "run.json").stat().st_mtime
        return run.state == "running" or time.time() - written < RECENT_SECONDS

    def _run(self, out: _Families, run: RunStatus) -> None:
        told = {"run": run.run, "profile": run.profile, "name": run.name, "user": run.user, "state": run.state}
        out.add("run_info", "1 for each run that is running or ended within the last hour.", told, 1)
        out.add("run_seconds", "Seconds from a run's start until now or its end.", {"run": run.run}, run.seconds)
        if (memory := self._memory(run)) is not None:
            out.add("run_memory_bytes", "Resident memory of a run's process on this host.", {"run": run.run}, memory)
        for stage in run.stages:
            if stage.cost is not None and stage.saved is not None:
                labels = {"run": run.run, "profile": run.profile, "stage": stage.name, "currency": run.currency}
                out.add("stage_cost", "Cost of a stage so far, if the config has a price.", labels, stage.cost)
                out.add(
                    "stage_saved", "Cost that recomputing a stage's reused results would have.", labels, stage.saved
                )
            self._stage(out, stage, dict(zip(STAGE, (run.run, run.profile, stage.name), strict=True)))

    def _memory(self, run: RunStatus) -> int | None:
        """Return the resident memory of a run's process in bytes; None if it is not running on this host."""
        process = read_file(run_folder(self._home, run.run)).process
        if run.state != "running" or is_dead(process) or "pid" not in process:
            return None
        try:
            return int(psutil.Process(process["pid"]).memory_info().rss)
        except psutil.Error:
            return None

    def _stage(self, out: _Families, stage: StageStatus, labels: dict[str, str]) -> None:
        out.add("stage_state", "1 for the state that a stage is in.", {**labels, "state": stage.state}, 1)
        out.add("stage_seconds", "Seconds of computing of a stage.", labels, stage.seconds)
        path = points_file(run_folder(self._home, labels["run"]), stage.name)
        curve = self._curves.setdefault(path, Curve(path))
        curve.read()
        if curve.time:
            out.add("stage_step", "Completed steps of a stage.", labels, curve.step)
            out.add(
                "stage_point_timestamp_seconds", "Time at which a stage last reported a metric.", labels, curve.time
            )
        if curve.total is not None:
            out.add("stage_steps", "Total steps of a stage.", labels, curve.total)
        if (pace := curve.tokens_per_second) is not None:
            out.add("stage_tokens_per_second", "Tokens per second over the newest minute.", labels, pace)
        for metric, value in curve.latest.items():
            out.add("stage_metric", "Newest value of each metric of a stage.", {**labels, "metric": metric}, value)
        for gate in stage.gates:
            if gate.threshold is None:
                continue
            named = {**labels, "gate": gate.name}
            text = "1: the gate passed. 0: it failed. 0.5: it failed, and was waived or only warns."
            out.add("gate_passed", text, named, 1.0 if gate.passed else 0.0 if gate.stops else 0.5)
            if gate.value is not None:
                out.add("gate_value", "Value that a gate judges.", named, gate.value)

    def _prefect(self, out: _Families) -> None:
        if self._queues is None:
            return
        try:
            waiting = list(self._queues())
        except Exception:  # `prefect_up` reports any failure, and the home's own metrics are still exported
            waiting = None
        out.add("prefect_up", "Whether the Prefect server answers.", {}, float(waiting is not None))
        for each in waiting or []:
            labels = {"pool": each.pool, "queue": each.queue, "state": each.state}
            out.add("queue_runs", "Flow runs of Tether in a work pool's queue.", labels, each.runs)


def queues() -> list[Queued]:
    """Return the waiting and running flow runs in the work pools of the server at `PREFECT_API_URL`. Errors of its
    client are passed on."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
        FlowRunFilterTags,
    )
    from prefect.client.schemas.objects import StateType

    from tasks.prefect_flow.server import TAG

    kinds = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]
    asked = FlowRunFilter(
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=kinds)), tags=FlowRunFilterTags(all_=[TAG])
    )
    found: Counter[tuple[str, str, str]] = Counter()
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(flow_run_filter=asked, limit=200, offset=found.total()):
            for each in page:
                state = each.state_type.value.lower() if each.state_type is not None else "none"
                found[each.work_pool_name or "", each.work_queue_name or "", state] += 1
    return [Queued(*key, runs) for key, runs in sorted(found.items())]


def export(home: Path, listen: str, port: int, ask_prefect: bool, say: Callable[[str], object]) -> None:
    """Serve metrics at http://`listen`:`port`/metrics until this process is told to stop.

    Raises:
        UserError: the address can't be listened on.
    """
    home.mkdir(parents=True, exist_ok=True)
    registry = CollectorRegistry()
    registry.register(RunCollector(home, queues if ask_prefect else None))
    try:
        server, thread = start_http_server(port, listen, registry)
    except OSError as error:
        raise UserError(f"--listen {listen} --port {port}: {error.strerror or error}. Give another one.") from error
    try:
        say(f"Metrics: http://{listen}:{server.server_port}/metrics. Ctrl-C stops the server.")
        with graceful():
            try:
                threading.Event().wait()
            except KeyboardInterrupt:
                return
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
