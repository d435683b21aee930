"""Run a pipeline as a Prefect flow: on the server of `PREFECT_API_URL`, or on one that this process starts."""

import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from threading import Thread

from data_contracts.expectations.suites import great_expectations
from tasks.execution import plots
from tasks.execution.context import RunContext
from tasks.execution.runner import run_stage
from tasks.prefect_flow.server import NoServer, is_own, no_answer, own_server
from tasks.result import StageResult, StageRunner
from tasks.stages import STAGES


def run_as_flow(
    ctx: RunContext, pipeline: Callable[[StageRunner], StageResult | None], server: ExitStack | None = None
) -> StageResult | None:
    """Call `pipeline` with a runner that makes each stage a task of a Prefect flow, and return its result.

    If this process's own server does not start, the stages run without Prefect. Errors of `pipeline` are passed on.

    Args:
        server: stops this process's own server, so that several runs share one; None stops it with the run.
    """
    imports: Thread | None = None
    with ExitStack() as stack:
        if is_own(url := os.environ.get("PREFECT_API_URL", "")) or not url:
            if server is not None and url and no_answer(f"{url}/health"):
                server.close()  # it has died: this run starts another
            imports = Thread(target=_load_ahead, args=(ctx,), daemon=True)
            imports.start()  # the server takes about 10 s to start; the imports use that time
            try:
                (server or stack).enter_context(own_server())
            except NoServer as error:
                ctx.say(f"Prefect's server did not start ({error}); the run continues without Prefect's pages")
                imports.join()
                return pipeline(partial(run_stage, ctx=ctx))
        # Imported here, because importing Prefect takes seconds, in which the server starts.
        from tasks.prefect_flow.pipeline_flow import call_in_flow

        return call_in_flow(ctx, pipeline, imports)


def _load_ahead(ctx: RunContext) -> None:
    """Load what would cost the stages seconds: MLflow's tables, and the libraries that check data, train and plot."""
    ctx.tracker()
    with suppress(ImportError):  # the stage that needs the library reports the error
        for stage in STAGES.values():
            stage.load_run()
        great_expectations()
        plots.load()
