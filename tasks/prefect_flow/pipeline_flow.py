"""The Prefect flow around a pipeline that the command line or the Python API runs."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any

from prefect import flow, tags
from prefect.client.schemas.objects import State
from prefect.runtime import flow_run
from prefect.settings import (
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    PREFECT_CLIENT_RETRY_EXTRA_CODES,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY,
    temporary_settings,
)

from tasks.execution.context import RunContext
from tasks.prefect_flow.alive import saying_that_it_lives
from tasks.prefect_flow.prefect_labels import awaiting
from tasks.prefect_flow.server import HEARTBEAT_SECONDS, PATIENCE, TAG
from tasks.prefect_flow.stage_tasks import (
    Outcome,
    flow_run_log,
    prefect_runner,
    show_in,
    unless_gone,
    wait_until_told,
)
from tasks.result import StageResult, StageRunner

_OWN_SERVER: dict[Any, Any] = {  # one that died stays dead, so do not wait at every call
    PREFECT_CLIENT_MAX_RETRIES: 1,
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None,
}
_SHARED_SERVER: dict[Any, Any] = {
    PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS,
    PREFECT_CLIENT_MAX_RETRIES: 6,  # about two minutes, because a person may be waiting
    PREFECT_CLIENT_RETRY_EXTRA_CODES: PATIENCE["PREFECT_CLIENT_RETRY_EXTRA_CODES"],
}


def call_in_flow(
    ctx: RunContext, pipeline: Callable[[StageRunner], StageResult | None], imports: Thread | None
) -> StageResult | None:
    """Call `pipeline` in a flow run on the server of `PREFECT_API_URL`, each stage as a task, and return its result.

    Args:
        imports: the thread that loads libraries, joined before the first stage; None if another process runs the
            server.
    """
    outcome: Outcome[StageResult | None] = Outcome()
    flow_run_ids: list[str] = []
    label, profile = ctx.status.document.label, ctx.status.document.profile
    title = f"{label.name} ({profile} {ctx.run})" if label.name else f"{profile} {ctx.run}"

    @flow(name="rlhf", flow_run_name=lambda: title, retries=0, persist_result=False)
    def rlhf_flow(run: str, profile: str) -> State[Any]:
        flow_run_ids.append(flow_run.id)
        ctx.reporting = replace(ctx.reporting, log=flow_run_log(flow_run.id))
        if imports is None:
            show_in(ctx, flow_run.id)
        else:
            imports.join()
        with saying_that_it_lives(flow_run.id) if imports is None else nullcontext():
            return outcome.capture(
                lambda: pipeline(prefect_runner(ctx)),
                name=lambda result: "AwaitingLabels" if result is None else "Completed",
                message=lambda result: awaiting(ctx.folder) if result is None else None,
            )

    settings = {PREFECT_API_URL: os.environ["PREFECT_API_URL"]} | (_SHARED_SERVER if imports is None else _OWN_SERVER)
    with temporary_settings(settings), tags(TAG, *label.written):
        state = unless_gone(lambda: rlhf_flow(run=ctx.run, profile=profile, return_state=True))
        for flow_run_id in flow_run_ids:
            unless_gone(partial(wait_until_told, flow_run_id))
    ctx.reporting = replace(ctx.reporting, log=None)
    return outcome.get(state)
