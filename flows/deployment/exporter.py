"""Export to Prometheus what no other server tells of a home's runs: states, steps, newest metrics, gates, queues.

It reads the home's files whenever Prometheus asks. docs/operations/watching.md lists the gauges.
"""

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from prometheus_client import start_http_server
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from components.base.errors import UserError
from components.training.stopping import graceful
from tasks.runs.points import Point, points_after, points_file
from tasks.runs.status import RUN_FILE, WORST_FIRST, StageStatus, load_readable

RECENT_SECONDS = 3600.0
"""How long a run is still exported in detail after its end."""
Queued = Mapping[tuple[str, str, str], int]
Newest = dict[Path, tuple[int, Point]]
"""Maps a points file to the number of bytes that were read and its newest values, as one point."""
Samples = Iterator[tuple[str, Mapping[str, str], float]]
"""Names of gauges without `tether_`, with labels and values."""


class RunCollector(Collector):
    """Collects running runs and those that ended within the last hour in detail, and all runs as counts by state."""

    def __init__(self, home: Path, queues: Callable[[], Queued] | None = None) -> None:
        """`queues` asks a Prefect server, and raises if it does not answer; None if there is no server."""
        self._home, self._queues = home, queues
        self._read: Newest = {}
        self._lock = threading.Lock()  # each request runs in its own thread

    def collect(self) -> Iterator[Metric]:
        """Return all current samples."""
        found: dict[str, GaugeMetricFamily] = {}
        with self._lock:
            for name, labels, value in self._samples():
                gauge = GaugeMetricFamily(f"tether_{name}", name.replace("_", " "), labels=list(labels))
                found.setdefault(name, gauge).add_metric(list(labels.values()), value)
        return iter(found.values())

    def _samples(self) -> Samples:
        yield "home_free_bytes", {"home": str(self._home)}, shutil.disk_usage(self._home).free
        readable, damaged = load_readable(self._home)
        states = Counter(run.state for run in readable) | Counter(damaged=len(damaged))
        yield from (("runs", {"state": state}, states[state]) for state in (*WORST_FIRST, "damaged"))
        before, self._read = self._read, {}  # files of runs that are no longer shown are forgotten
        for run in readable:
            folder = self._home / "runs" / run.run
            if run.state == "running" or time.time() - (folder / RUN_FILE).stat().st_mtime < RECENT_SECONDS:
                for stage in run.stages:
                    labels = {"run": run.run, "profile": run.profile, "stage": stage.name}
                    yield from self._stage(stage, labels, points_file(folder, stage.name), before)
        if self._queues is not None:
            try:
                queued = self._queues()
            except Exception:  # `prefect_up` reports any failure, and the home's own metrics are still exported
                queued = None
            yield "prefect_up", {}, float(queued is not None)
            for (pool, queue, state), runs in (queued or {}).items():
                yield "queue_runs", {"pool": pool, "queue": queue, "state": state}, runs

    def _stage(self, stage: StageStatus, labels: Mapping[str, str], path: Path, before: Newest) -> Samples:
        offset, newest = before.get(path, (0, {"metrics": {}}))
        points, offset = points_after(path, offset)
        for point in points:
            step, metrics = max(point["step"], newest.get("step", 0)), newest["metrics"] | point["metrics"]
            newest = newest | point | {"step": step, "metrics": metrics}
        self._read[path] = offset, newest
        yield "stage_state", {**labels, "state": stage.state}, 1.0
        shown = {"stage_step": ("step", 1), "stage_steps": ("total", 1), "stage_point_timestamp_seconds": ("time", 1e3)}
        yield from ((name, labels, newest[field] / unit) for name, (field, unit) in shown.items() if field in newest)
        yield from (("stage_metric", {**labels, "metric": name}, value) for name, value in newest["metrics"].items())
        for gate in (gate for gate in stage.gates if gate.threshold is not None):
            yield "gate_passed", {**labels, "gate": gate.name}, 1.0 if gate.passed else 0.0 if gate.stops else 0.5
            if gate.value is not None:
                yield "gate_value", {**labels, "gate": gate.name}, gate.value


def queues() -> Queued:
    """Return how many flow runs of Tether wait or run on the server, by work pool, queue and state."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas import filters

    from tasks.prefect_flow.server import TAG

    state = filters.FlowRunFilterState.model_validate({"type": {"any_": ["SCHEDULED", "PENDING", "RUNNING"]}})
    ours = filters.FlowRunFilter(state=state, tags=filters.FlowRunFilterTags(all_=[TAG]))
    found: Counter[tuple[str, str, str]] = Counter()
    with get_client(sync_client=True) as client:
        while page := client.read_flow_runs(flow_run_filter=ours, limit=200, offset=found.total()):
            for run in page:
                state_type = run.state_type.value.lower() if run.state_type else ""
                found[run.work_pool_name or "", run.work_queue_name or "", state_type] += 1
    return found


def export(home: Path, listen: str, port: int, ask_prefect: bool, say: Callable[[str], object]) -> None:
    """Serve http://`listen`:`port`/metrics until told to stop. Raises UserError if the address can't be listened on."""
    home.mkdir(parents=True, exist_ok=True)
    registry = CollectorRegistry()
    registry.register(RunCollector(home, queues if ask_prefect else None))
    try:
        server, _ = start_http_server(port, listen, registry)
    except OSError as error:
        raise UserError(f"--listen {listen} --port {port}: {error.strerror or error}. Give another one.") from error
    with server, graceful(), suppress(KeyboardInterrupt):
        try:
            say(f"Metrics: http://{listen}:{server.server_port}/metrics. Ctrl-C stops the server.")
            threading.Event().wait()
        finally:
            server.shutdown()
