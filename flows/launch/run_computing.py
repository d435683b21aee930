"""Compute a run that has begun, and give out its sheets if people judge it."""

from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from itertools import dropwhile

from components.base.errors import TetherError
from components.base.files import write_whole
from components.base.settings import Settings
from components.models.runtime import check_machine
from flows.config.run_config import RunConfig
from flows.launch.begin import Launch
from flows.people.label_progress import begin_waiting
from flows.people.rater_sheets import give_out
from flows.rlhf import pipeline
from flows.sources import Sources
from tasks.execution.context import RunContext
from tasks.execution.runner import peek, run_stage
from tasks.result import Given, StageResult
from tasks.runs.status import load_status
from tasks.stages import COMPARISON as COMPARED
from tasks.stages import STAGES, Stage, reaches

COMPARISON = "comparison.md"
"""The result of a comparison of models, in a run's folder."""


def compute(launch: Launch, server: ExitStack | None = None) -> StageResult | None:
    """Run the pipeline, and record how the run ended even if it fails. `server` as in `run_as_flow`.

    Returns:
        The result of human_eval, or of the stage that `until` names; None if the run waits for labels.

    Raises:
        UserError: a stage's runner is a pool, and there is no server or deployment for it; or this machine cannot
            compute a stage. Errors of a stage are passed on unchanged.
    """
    ctx, config, sources, _ = launch
    run_pipeline = partial(pipeline, config, sources, until=ctx.status.document.until)
    first = first_to_compute(config, sources, ctx)
    if first is None:
        return _go(launch, lambda: run_pipeline(partial(run_stage, ctx=ctx)))
    from tasks.prefect_flow.server import check_server
    from tasks.prefect_flow.start_flow import run_as_flow

    try:
        _check_machine(launch, first)
        pools = {stage: pool for stage, pool in config.pools.items() if reaches(stage, ctx.status.document.until)}
        check_server(needed_for={stage: pool for stage, pool in pools.items() if stage not in ctx.reuse.pinned})
    except TetherError:
        ctx.discard()
        raise
    return _go(launch, lambda: run_as_flow(ctx, run_pipeline, server))


def compute_in_flow(launch: Launch, flow_run: str) -> StageResult | None:
    """Do the same as `compute` inside a deployment's flow run: each stage is a task of the flow run `flow_run`."""
    from tasks.prefect_flow.stage_tasks import prefect_runner, show_in

    ctx, config, sources, _ = launch
    show_in(ctx, flow_run)

    def work() -> StageResult | None:
        _check_machine(launch, first_to_compute(config, sources, ctx))
        return pipeline(config, sources, prefect_runner(ctx), ctx.status.document.until)

    return _go(launch, work)


def _go(launch: Launch, work: Callable[[], StageResult | None]) -> StageResult | None:
    """Call `work` as the run that `launch` has begun, and show its report."""
    ctx = launch.ctx
    try:
        with ctx:
            for note in launch.notes:
                ctx.say(note)
            try:
                result = work()
            finally:  # even if a gate on the raters stops the run, their answers are reported
                if launch.sources.compared:
                    _write_comparison(ctx)
            if result is None:
                ctx.end_stage("human_eval", "awaiting_labels")
                give_out(ctx.store.path(ctx.status.stage("human_eval").digest or ""), ctx.folder)
        if result is None:
            begin_waiting(ctx.home, ctx.run, ctx.say)
        return result
    finally:
        if ctx.reporting.flow_run:
            from tasks.prefect_flow.stage_tasks import show_report

            show_report(ctx)


def _write_comparison(ctx: RunContext) -> None:
    from components.human_eval.comparison.model_pairs import RESULT
    from flows.models.compared_models import result_text
    from tasks.runs.comparison_names import compared_names

    digest = ctx.status.stage("human_eval").digest
    if digest is not None and (ctx.store.path(digest) / RESULT).is_file():
        text = result_text(ctx.store.path(digest), compared_names(load_status(ctx.home, ctx.run).origin))
        write_whole(ctx.folder / COMPARISON, text)


def _check_machine(launch: Launch, first: str | None) -> None:
    """Check that this machine can compute the stages from `first` on that are not a pool's."""
    ctx, config, sources, _ = launch
    stages = (COMPARED if sources.compared else STAGES).values()
    for stage in dropwhile(lambda stage: stage.name != first, stages):
        here = stage.name not in ctx.reuse.pinned and stage.group not in config.pools
        runtime = getattr(config.stage_job(stage), "runtime", None) if "torch" in stage.libraries else None
        if runtime is not None and config.has(stage.name) and here:
            check_machine(runtime)
        if stage.name == ctx.status.document.until:
            return


class _Enough(Exception):
    """Ends the search in the store. The argument is the stage to compute, None if everything needed is stored."""


def first_to_compute(
    config: RunConfig, sources: Sources, ctx: RunContext, until: str | None = None, only: Collection[str] | None = None
) -> str | None:
    """Return the first stage that is not stored, up to `until` (None: the run's end) or the first failed gate; None if
    all are.

    Args:
        only: the keys whose results count as stored; None for all.
    """

    def stored(stage: Stage, job: Settings, inputs: Given) -> StageResult:
        result = peek(stage, job, inputs, ctx)
        if result is None or (only is not None and result.record.key not in only):
            raise _Enough(stage.name)
        if result.state == "gate_failed":
            raise _Enough(None)
        return result

    try:
        pipeline(config, sources, stored, ctx.status.document.until if until is None else until)
    except _Enough as enough:
        return enough.args[0]
    return None
