"""The flows that a Prefect server runs: the pipeline, scoring of people's labels, and computing a stage on a worker.

`tether deploy` registers them. They run the same code as the command line, and their end states say how they ended. If
Prefect retries a flow run, it continues the run that it began.
"""

from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any
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
from flows.launch.label_runs import scoring
from flows.launch.request import Request
from flows.launch.run_computing import compute_in_flow
from tasks.allowed import refuse_path
from tasks.execution import logs
from tasks.execution.dispatch import FLOW, Order, receive
from tasks.execution.stage_progress import StageProgress, say
from tasks.prefect_flow.alive import saying_that_it_lives
from tasks.prefect_flow.prefect_labels import awaiting
from tasks.prefect_flow.stage_tasks import Outcome, unless_gone
from tasks.runs.journal import REPORT, current_user
from tasks.runs.schema import check_home
from tasks.stages import KNOWN, StageName


@flow(
    name="rlhf",
    flow_run_name="{profile}",
    description="The pipeline: validate, sft, reward, ppo, human_eval. Stored results are reused.",
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
    """Run the pipeline or a part of it. The form on this page shows the descriptions of the parameters in this order.

    Args:
        from_stage: Compute from this stage on. Results of earlier stages come from an earlier run of this config.
        from_run: The id of that earlier run. Empty: the newest run whose artifacts are all in the store.
        refresh: Further stages to recompute even if a result is stored.
        name: A name for the run.
        note: A remark on the run, in one line. It is stored as the tag "note".
        tags: Each KEY=VALUE or KEY.
        started_by: Your name, for the run's record, because the server knows no users.
        waive: Gates that may fail in this run. Give the reason and your name in the next two fields.
        because: Why they may fail. It is recorded.
        waived_by: Your name. It is recorded with the waivers.
        profile: The name in the run's id.
        changes: Options that differ in this run, as JSON, checked when you submit; in ppo for example
            {"updates": 80, "kl": {"target": 4}}. The tab Parameters of the deployment's page shows the deployed config.
        config: The complete deployed config.
    """
    if from_run is not None and from_stage is None:
        return Failed(name="UserError", message=f"from_run = {from_run}: also give the stage, with from_stage.")
    flow_run = str(runtime.flow_run.id)

    def begin(home: Path) -> Launch:
        changed_config = form.changed(config, changes)
        refuse_own_pool(changed_config, pool_of(flow_run))
        request = Request(
            form.waivers(waive, because, waived_by, changed_config),
            refresh,
            label=form.label(name, note, tags),
            user=form.person("started_by", started_by, starter(flow_run)),
            flow_run=flow_run,
        )
        if from_stage is None:
            begun = new_run(home, profile, changed_config, request)
        else:
            begun = rerun(home, from_stage, from_run, config=changed_config, profile=profile, request=request)
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
        refuse_path("sheet", sheet, home)
        user = form.person("scored_by", scored_by, starter(str(runtime.flow_run.id)))
        return scoring(home, run, Path(sheet), Request(user=user))

    return _run(begin)


@flow(name=FLOW, flow_run_name="{order.stage} for {order.run}", retries=0, persist_result=False)
def compute(order: Order) -> State[Any]:
    """Compute one stage that a pipeline elsewhere has ordered. Not meant to be started by people."""

    def work(home: Path, console: Console) -> tuple[str, str | None]:
        store = ArtifactStore(home)
        logs.bind(run=order.run, stage=KNOWN[order.stage].group)
        say(console, f"{order.stage} for run {order.run}: reading and writing {store.place.where}")
        with StageProgress(console, order.stage) as progress:
            record = receive(order, store, progress.show, lambda text: say(console, text))
        say(console, f"{order.stage}: artifact {record.digest[:12]}")
        return "Completed", None

    return _guarded(work)


def refuse_own_pool(config: RunConfig, pipeline_pool: str | None) -> None:
    """Refuse a config whose pipeline orders a stage from the pool that the pipeline itself runs in.

    Args:
        config: the pipeline's config.
        pipeline_pool: the pool that runs the pipeline, if any.

    Raises:
        UserError: a stage's pool is `pipeline_pool`; the message names the stage.
    """
    for stage, pool in config.pools.items():
        if pool == pipeline_pool:
            raise UserError(
                f"runners.{stage} = {pool}: the pool {pool} runs the pipelines. Each keeps its place there while "
                f"it waits for its {stage}, so if all places are taken, no {stage} can start. Set runners.{stage} to "
                f"local, which computes it in the pipeline's own process, or to another pool, which "
                f"`tether deploy --pool NAME` creates."
            )


def _call_flow_run(flow_run: str, name: str) -> None:
    """Give a flow run a name with our run's id, which exists only once the run has begun."""

    def call() -> None:
        with get_client(sync_client=True) as client:
            client.update_flow_run(UUID(flow_run), name=name)

    unless_gone(call)


def starter(flow_run: str) -> str:
    """Return who started a flow run: its schedule, or otherwise the worker's user."""
    with get_client(sync_client=True) as client:
        by_schedule = client.read_flow_run(UUID(flow_run)).auto_scheduled
    return "its schedule" if by_schedule else f"{current_user()} (a worker)"


def pool_of(flow_run: str) -> str | None:
    """Return the work pool that runs a flow run; None if there is none."""
    with get_client(sync_client=True) as client:
        return client.read_flow_run(UUID(flow_run)).work_pool_name


def _run(begin: Callable[[Path], Launch]) -> State[Any]:

    def go(home: Path, console: Console) -> tuple[str, str | None]:
        begun = begin(home)
        begun.ctx.reporting = replace(begun.ctx.reporting, console=console)
        say(console, f"run {begun.ctx.run} in {home}")
        try:
            result = compute_in_flow(begun, str(runtime.flow_run.id))
        finally:
            say(console, f"report: {begun.ctx.folder / REPORT}")
        if result is not None:
            return "Completed", None
        say(console, f"waiting for people's labels: give each rater a file of {begun.ctx.folder / RATERS}")
        return "AwaitingLabels", awaiting(begun.ctx.folder)

    return _guarded(go)


def _guarded(call: Callable[[Path, Console], tuple[str, str | None]]) -> State[Any]:
    """Call `call` with this home and a console that writes to the flow run's log, and return the end state, whose name
    and message `call` returns."""

    def in_this_environment() -> tuple[str, str | None]:
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
            logger.exception("This is a bug in Tether, not a mistake of yours:")
            raise

    home = tether_home()
    return Outcome[tuple[str, str | None]]().capture(in_this_environment, itemgetter(0), itemgetter(1))
