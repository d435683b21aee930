"""The flows that a Prefect server runs: the pipeline, people's labels, and a worker's computing.

`tether deploy` registers them. They take the same way as the command line, and end in states that say how. A flow run
that is tried again takes up the run of ours that it began.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar
from uuid import UUID

from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Failed
from pydantic import Field
from rich.console import Console

from components.base.errors import TetherError, UserError, disk_error
from components.human_eval.sheet import RATERS
from components.store.store import ArtifactStore
from flows.config.run_config import RunConfig
from flows.deployment import form
from flows.environment import check_packages, prepare_environment, tether_home
from flows.launch.begin import Launch, new_run, rerun
from flows.launch.computing import compute_in_flow
from flows.launch.labels import scoring
from tasks.execution import logs
from tasks.execution.dispatch import FLOW, Order, receive
from tasks.execution.progress import StageProgress, say
from tasks.prefect_flow.alive import saying_that_it_lives
from tasks.prefect_flow.labels import awaiting
from tasks.prefect_flow.stages import Outcome, unless_gone
from tasks.runs.journal import REPORT, current_user
from tasks.runs.schema import check_home
from tasks.stages import KNOWN, StageName

T = TypeVar("T")


@flow(
    name="rlhf",
    flow_run_name="{profile}",
    description="The pipeline: validate, sft, reward, ppo, human_eval. A stored result is not computed again.",
    retries=0,
    persist_result=False,
)
def rlhf(
    *,
    from_stage: StageName | None = None,
    from_run: str | None = None,
    refresh: list[StageName] = [],  # noqa: B006
    name: str | None = None,
    note: str | None = None,
    tags: list[str] = [],  # noqa: B006
    started_by: str | None = None,
    waive: list[str] = [],  # noqa: B006
    because: str | None = None,
    waived_by: str | None = None,
    profile: str = "custom",
    changes: dict[str, Any] = {},  # noqa: B006
    config: RunConfig,
) -> State[Any]:
    """Run the pipeline, or a part of it. This page's form shows what stands here of each parameter, in this order.

    Args:
        from_stage: Compute from this stage on. The ones before are taken from an earlier run of this config.
        from_run: That earlier run. Empty: the newest whose artifacts are all in the store.
        refresh: Further stages to compute though they are stored.
        name: What to call the run.
        note: What to know of it, in a line. It is kept as the tag "note".
        tags: Each KEY=VALUE or KEY.
        started_by: Your name, for the record of the run: the server knows no users.
        waive: Gates that may fail in this run. Say why, and who you are, in the next two fields.
        because: Why they are waived. It is recorded.
        waived_by: Your name. It is recorded with the waivers.
        profile: What the run is called after.
        changes: Options that differ in this run, as JSON, checked when you submit; in ppo for example
            {"updates": 80, "kl": {"target": 4}}. What is deployed is in the tab Parameters of the deployment's page.
        config: The deployed config, whole.
    """
    if from_run is not None and from_stage is None:
        return Failed(name="UserError", message=f"from_run = {from_run}: name the stage too, with from_stage.")
    flow_run = str(runtime.flow_run.id)

    def begin(home: Path) -> Launch:
        asked = form.changed(config, changes)
        refuse_own_pool(asked, pool_of(flow_run))
        options: dict[str, Any] = {
            "waivers": form.waivers(waive, because, waived_by, asked),
            "refresh": refresh,
            "flow_run": flow_run,
            "label": form.label(name, note, tags),
            "user": form.person("started_by", started_by, starter(flow_run)),
        }
        if from_stage is None:
            begun = new_run(home, profile, asked.resolved(), **options)
        else:
            begun = rerun(home, from_stage, from_run, config=asked, profile=profile, **options)
        _call_flow_run(flow_run, f"{name} ({profile} {begun.ctx.run})" if name else f"{profile} {begun.ctx.run}")
        return begun

    return _run(begin)


@flow(name="human-eval", flow_run_name="score {run}", retries=0, persist_result=False)
def human_eval(
    sheet: Annotated[str, Field(description="The filled sheet, or a folder of raters' files, as the worker sees it.")],
    run: Annotated[str | None, Field(description="The run that awaits these labels; empty: the newest.")] = None,
    scored_by: Annotated[str | None, Field(description="Your name, for the record of the score.")] = None,
) -> State[Any]:
    """Score people's labels, and finish the run that awaits them."""

    def begin(home: Path) -> Launch:
        user = form.person("scored_by", scored_by, starter(str(runtime.flow_run.id)))
        return scoring(home, run, Path(sheet), user=user)

    return _run(begin)


@flow(name=FLOW, flow_run_name="{order.stage} for {order.run}", retries=0, persist_result=False)
def compute(order: Order) -> State[Any]:
    """Compute one stage that a pipeline elsewhere has ordered. Not for people: the parameters are an order's."""

    def work(home: Path, console: Console) -> str:
        store = ArtifactStore(home)
        logs.bind(run=order.run, stage=KNOWN[order.stage].shown)
        say(console, f"{order.stage} for run {order.run}: reading and writing {store.place.where}")
        with StageProgress(console, order.stage) as progress:
            record = receive(order, store, progress.show, lambda text: say(console, text))
        say(console, f"{order.stage}: artifact {record.digest[:12]}")
        return record.digest

    return _guarded(work)


def refuse_own_pool(config: RunConfig, own: str | None) -> None:
    """Refuse a config whose pipeline orders a stage from the pool that it runs on.

    Args:
        config: of the pipeline.
        own: the pool that runs it, if one does.

    Raises:
        UserError: naming the stage.
    """
    for stage, pool in config.pools.items():
        if pool == own:
            raise UserError(
                f"runners.{stage} = {pool}: the pool {pool} runs the pipelines. Each keeps its place there while it "
                f"waits for its {stage}, so with every place taken no {stage} could start. Set runners.{stage} to "
                f"local, which computes it in the pipeline's own process, or to another pool, which "
                f"`tether deploy --pool NAME` makes."
            )


def _call_flow_run(flow_run: str, name: str) -> None:
    """Give a flow run a name that has our run's id, which there is once it has begun."""

    def call() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run), name=name)

    unless_gone(call)


def starter(flow_run: str) -> str:
    """Return who started a flow run: its schedule, or else the worker's user."""
    with get_client(sync_client=True) as client:
        by_schedule = client.read_flow_run(UUID(flow_run)).auto_scheduled
    return "its schedule" if by_schedule else f"{current_user()} (a worker)"


def pool_of(flow_run: str) -> str | None:
    """The work pool that runs a flow run."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run)).work_pool_name


def _run(begin: Callable[[Path], Launch]) -> State[Any]:
    """Begin a run and compute it; a state says how it ended."""

    def go(home: Path, console: Console) -> str:
        begun = begin(home)
        begun.ctx.console = console
        say(console, f"run {begun.ctx.run} in {home}")
        try:
            result = compute_in_flow(begun, str(runtime.flow_run.id))
        finally:
            say(console, f"report: {begun.ctx.folder / REPORT}")
        if result is None:
            say(console, f"waiting for people's labels: each rater gets a file of {begun.ctx.folder / RATERS}")
            waiting.append(awaiting(begun.ctx.folder))
        return "Completed" if result is not None else "AwaitingLabels"

    waiting: list[str] = []
    return _guarded(go, name=lambda state: state, message=lambda _: waiting[0] if waiting else None)


def _guarded(
    call: Callable[[Path, Console], T],
    name: Callable[[T], str] = lambda _: "Completed",
    message: Callable[[T], str | None] = lambda _: None,
) -> State[Any]:
    """Call with this home and a console whose lines are the flow run's log."""

    def in_this_environment() -> T:
        check_packages()
        prepare_environment(home)
        check_home(home)
        logger = get_run_logger()
        try:
            with saying_that_it_lives(str(runtime.flow_run.id)):
                return call(home, Console(file=logs.LogLines(logger.info), width=200))
        except TetherError:
            raise
        except Exception as error:
            if (mendable := disk_error(error)) is not None:
                raise mendable from error
            logger.exception("This is a mistake of Tether's, not yours:")
            raise

    home = tether_home()
    return Outcome[T]().capture(in_this_environment, name, message)
