"""Let a worker compute a stage: order it from a work pool's deployment, or find a run of it, and follow that.

The caller and the worker share the store, and through it the key's lock, the checkpoint, the points and the record. A
worker's run does not depend on the caller: if the caller dies, it continues, and the next caller attaches to it.
"""

import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterTags
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.context import FlowRunContext
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings
from prefect.states import Cancelling
from prefect.utilities.urls import url_for
from pydantic import Field, JsonValue

from components.base import errors
from components.base.errors import MachineMismatch, StageTimeout, TetherError, UserError, WorkerDied
from components.base.redaction import redacted
from components.base.settings import Settings
from components.keys.changes import KeyParts, changes, in_a_line
from components.models.runtime import Runtime
from components.store.place import VARIABLE as STORE_VARIABLE
from components.store.store import ArtifactStore, Miss, Record
from tasks.allowed import refuse_outside, refuse_path
from tasks.execution.away import Server
from tasks.execution.computing import POINTS, Show, Work, compute_once
from tasks.execution.keying import key_of
from tasks.result import Input
from tasks.runs.points import points_after
from tasks.stages import stage_of

FLOW = "compute"
"""The flow that computes an order. It is deployed once to each pool, under the pool's name."""

POLL_SECONDS = 1.0
UNTAKEN_SECONDS = 60.0
"""How long an order may wait before we warn that no worker has picked it up."""
NO_HEARTBEAT = "No heartbeat"
"""The start of the message of a run that a server set to `Crashed` because its heartbeat stopped."""
DOUBT_SECONDS = 30.0
"""How long such a run may take to report that it is alive, once the server answers."""
STOP_SECONDS = 60.0
"""How long a run that exceeds its stage's time limit may take to stop itself."""
LIVE = (StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING)

Say = Callable[[str], None]


class Order(Settings):
    """A `Work` in the form that is sent to a worker."""

    stage: str
    key: str
    run: str = Field(description="The run that wants the result.")
    job: dict[str, JsonValue]
    inputs: dict[str, Input] = Field(description="Paths of stored inputs are those of the caller.")
    parts: KeyParts = Field(description="The parts of the key, to explain how a worker differs.")
    refresh: bool = Field(False, description="Recompute even if the store has a result.")
    because: str = Field("", description="Why it is computed, for the worker's log.")
    timeout: float | None = Field(None, description="Seconds that one attempt may take.")
    store: str = Field("", description="The caller's store and machine.")


# -- the caller ------------------------------------------------------------------------------------------------------


def check_pools(pools: Iterable[str]) -> None:
    """Raise UserError if a pool has no deployment on the server."""
    with get_client(sync_client=True) as client:
        for pool in sorted(set(pools)):
            try:
                client.read_deployment_by_name(f"{FLOW}/{pool}")
            except ObjectNotFound:
                raise UserError(
                    f"runners: the Prefect server knows no deployment {FLOW}/{pool} that computes stages on the pool "
                    f"{pool}. Run `tether deploy --pool {pool}`, or set the stage's runner to local."
                ) from None


def dispatch(
    work: Work, pool: str, store: ArtifactStore, show: Show, say: Say, refresh: bool,
    page: Callable[[str], object], computed: Callable[[float], object],
) -> Record:  # fmt: skip
    """Let `pool` compute `work`, or attach to a run that already does, and wait for its end.

    `page` is called with the address of that run's page, which shows log and progress. `computed` is called with the
    seconds that it computed, however it ended, unless another run ordered it.

    Raises:
        TetherError: the error that the stage raised; or the run crashed or was cancelled (a rerun continues it).
    """
    # The code below waits for the server. Prefect's own retries would wait a minute without a message, and then give
    # up.
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}), get_client(sync_client=True) as client:
        server = Server(f"{work.stage.name}: the Prefect server", "waiting", say)
        of_key = FlowRunFilter(tags=FlowRunFilterTags(all_=[f"key:{work.key}"]))
        runs = server.insist(lambda: client.read_flow_runs(flow_run_filter=of_key))
        live = next((run for run in runs if run.state is not None and run.state.type in LIVE), None)
        if ordered := live is None:
            live = server.insist(lambda: _start(work, pool, store, refresh, attempt=len(runs) + 1))
            say(f"{work.stage.name}: given to pool {pool}, {_url(live)}")
        else:
            say(f"{work.stage.name}: attached to {_url(live)}, which computes it already")
        page(redacted(url_for(live) or ""))
        offset = 0

        def show_points(path: Path) -> None:
            nonlocal offset
            points, offset = points_after(path, offset)
            for point in points:
                show(point)

        at_work = store.work_folder(work.key) / POINTS
        timeout = work.timeout if ordered else None  # the run that ordered it sets its time limit
        ours = (live.parameters.get("order") or {}).get("run") == work.run
        try:
            run = _follow(client, live, lambda: show_points(at_work), work.stage.name, pool, say, timeout)
        except StageTimeout:
            computed((work.timeout or 0.0) + STOP_SECONDS)
            raise
    if ours:
        computed(run.total_run_time.total_seconds())
    _raise_unless_completed(run, work)
    record = store.lookup(work.key)
    if isinstance(record, Miss):
        raise TetherError(
            f"{work.stage.name}: {_url(run)} completed, but {_place(store)} has nothing of it ({record.reason}): the "
            f"worker of pool {pool} wrote to another place, which its log names. {SHARE}"
        )
    if all_points := store.attachment(record, POINTS):
        show_points(all_points)
    return record


def _start(work: Work, pool: str, store: ArtifactStore, refresh: bool, attempt: int) -> FlowRun:
    started = run_deployment(
        f"{FLOW}/{pool}",
        parameters={"order": _order(work, refresh, store).model_dump(mode="json")},
        tags=[f"key:{work.key}"],
        work_queue_name=_queue(pool),
        idempotency_key=f"{work.key}:{attempt}",  # two simultaneous callers create one run
        timeout=0,
    )
    assert isinstance(started, FlowRun)  # it is a coroutine only inside an event loop
    return started


def _queue(pool: str) -> str | None:
    """Return the queue of `pool` that is called like the pipeline's own queue; None if there is none or no pool runs
    it."""
    context = FlowRunContext.get()
    name = context.flow_run.work_queue_name if context is not None and context.flow_run is not None else None
    if name is None:
        return None
    with get_client(sync_client=True) as client:
        return name if any(queue.name == name for queue in client.read_work_queues(work_pool_name=pool)) else None


def _order(work: Work, refresh: bool, store: ArtifactStore) -> Order:
    return Order(
        stage=work.stage.name,
        key=work.key,
        run=work.run,
        job=work.job.model_dump(mode="json"),
        inputs={
            name: source.model_copy(update={"path": source.path.absolute()}) for name, source in work.inputs.items()
        },
        parts=work.parts,
        refresh=refresh,
        because=work.because,
        timeout=work.timeout,
        store=_place(store),
    )


def _place(store: ArtifactStore) -> str:
    return f"{store.place.where} on {platform.node()}"


SHARE = (
    f"All machines need one store: mount one folder at the same path on each and set TETHER_HOME to it where you run "
    f"`tether deploy` (workers get it from there), or set {STORE_VARIABLE} to a shared store (docs/operations.md)."
)


def _url(run: FlowRun) -> str:
    return redacted(url_for(run) or f"flow run {run.id}")


def _follow(
    client: SyncPrefectClient, run: FlowRun, show_points: Callable[[], None], stage: str, pool: str, say: Say,
    timeout: float | None = None,
) -> FlowRun:  # fmt: skip
    """Wait for the run's end and report its states. Waits on if the server is away or the run may still be alive.

    Raises:
        StageTimeout: it ran longer than `timeout` seconds, did not stop itself, and was cancelled.
    """
    seen, taken_by, given_up_at, overdue_at = "", time.monotonic() + UNTAKEN_SECONDS, float("inf"), float("inf")
    server = Server(f"{stage}: the Prefect server", "the worker keeps running; waiting", say)
    while True:
        now = time.monotonic()
        answer = server.ask(lambda: client.read_flow_run(run.id))  # noqa: B023 - called at once
        run = answer or run
        show_points()
        state = run.state
        if answer is None or not taken_for_dead(run):
            given_up_at = float("inf")
        else:
            given_up_at = min(given_up_at, now + DOUBT_SECONDS)
        if state is not None and state.is_final() and (not taken_for_dead(run) or now > given_up_at):
            return run
        if timeout is not None and state is not None and state.is_running():
            overdue_at = min(overdue_at, now + timeout + STOP_SECONDS)
        if now > overdue_at:  # its process has not stopped itself
            server.insist(lambda: client.set_flow_run_state(run.id, Cancelling(message="It took too long.")))  # noqa: B023
            raise StageTimeout(f"{stage}: {_url(run)} took longer than {timeout:g} s, did not stop, and was cancelled.")
        if state is not None and state.name and state.name != seen:
            seen = state.name
            say(f"{stage}: {seen.lower()} on pool {pool}")
        if state is not None and state.is_scheduled() and now > taken_by:
            taken_by = float("inf")
            worker = f"`prefect worker start --pool {pool}`"
            say(f"{stage}: no worker has taken it yet. Check that one is running ({worker}) and free.")
        time.sleep(POLL_SECONDS)


def taken_for_dead(run: FlowRun) -> bool:
    """Return whether the server set the run to `Crashed` because its heartbeat stopped; its process may still live."""
    return run.state is not None and run.state.is_crashed() and (run.state.message or "").startswith(NO_HEARTBEAT)


def _raise_unless_completed(run: FlowRun, work: Work) -> None:
    state = run.state
    assert state is not None
    if state.is_completed():
        return
    text = (state.message or "").strip()
    kind = getattr(errors, state.name or "", None)
    if isinstance(kind, type) and issubclass(kind, TetherError):
        raise kind(text)
    then = "" if text.endswith(".") or not text else "."
    error = WorkerDied if state.is_crashed() else TetherError
    raise error(
        f"{work.stage.name}: {_url(run)} ended as {state.name}{': ' if text else ''}{text}{then} Run the same command "
        "again to continue from its last checkpoint."
    )


# -- the worker ------------------------------------------------------------------------------------------------------


def receive(order: Order, store: ArtifactStore, show: Show, say: Say) -> Record:
    """Compute an order, unless the store already has the result.

    Raises:
        MachineMismatch: on this machine, or with its code, the key would be different. Errors of the stage are passed
                on.
    """
    stage = stage_of(order.stage, order.job)
    job = stage.load_job().model_validate(order.job)
    _check_machine(getattr(job, "runtime", None))
    refuse_outside(job, store.home)
    for name, source in order.inputs.items():
        if not source.stored:
            refuse_path(name, str(source.path), store.home)
    inputs = {name: _found(source, store, order.store) for name, source in order.inputs.items()}
    key, parts = key_of(stage, job, inputs)
    if key != order.key:
        raise MachineMismatch(
            f"this worker would compute a different {stage.name} (ordered -> here): "
            f"{in_a_line(changes(order.parts, parts), most=10)}. Install the same Tether and libraries on both."
        )
    work = Work(stage, job, inputs, key, parts, order.run, order.because, order.timeout)
    return compute_once(work, store, show, say, order.refresh)[0]


def _found(source: Input, store: ArtifactStore, place: str) -> Input:
    """Return an input as it is on this worker; `place` is the caller's store."""
    if source.stored:
        if (store.contents.problem(source.digest) or "").startswith("missing"):
            raise MachineMismatch(
                f"{source.name}: this worker looked for artifact {source.digest[:12]} in {_place(store)} and it is not "
                f"there. The pipeline has it in {place or 'its own store'}. {SHARE}"
            )
        return source.model_copy(update={"path": store.path(source.digest)})
    if not source.path.exists() or Input.of(source.path).digest != source.digest:
        what = "holds other bytes than where the run was started" if source.path.exists() else "does not exist"
        raise MachineMismatch(
            f"{source.name}: {source.path} {what} on this worker ({platform.node()}). Put it into a folder that all "
            f"machines see at the same path, and name it by that path in the config."
        )
    return source


def _check_machine(wanted: Runtime | None) -> None:
    if wanted is not None and (problems := wanted.misfits()):
        raise MachineMismatch(
            f"this worker does not match the machine that the run was resolved for: {'; '.join(problems)}. Set the "
            f"stage's runner to it, as in runners.ppo.runtime={{{Runtime().resolve().setting}}}, or run a worker on "
            "such a machine."
        )
