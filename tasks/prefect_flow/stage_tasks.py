"""Run stages as Prefect tasks. The store is the only cache, so a task also looks up, records and judges on a hit.

A task does not raise expected errors, because Prefect would print a stack trace. It ends in a state that names the
error, and the error is raised again outside the task.
"""

import logging
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Generic, TypeVar
from uuid import UUID

from prefect import runtime, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, LogCreate
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.states import Completed, Failed
from prefect.utilities.urls import url_for

from components.base.errors import TetherError
from components.base.redaction import redacted
from components.base.settings import Settings
from components.base.text import markdown, markdown_code
from components.gates import gate_text
from components.gates.table import brief_metrics
from tasks.execution import logs
from tasks.execution.away import is_away
from tasks.execution.context import RunContext
from tasks.execution.runner import run_stage
from tasks.lineage.of_run import graph_of, verdict_in_short
from tasks.lineage.picture import in_markdown
from tasks.prefect_flow.server import is_answering
from tasks.result import Given, StageResult
from tasks.runs.journal import REPORT, REPORT_TEXT, readable_done
from tasks.stages import Stage
from tasks.tracking.address import mlflow_file, mlflow_page

T = TypeVar("T")

_NAMES = {"cached": "Cached", "waived": "GateWaived", "skipped": "Skipped"}


class Outcome(Generic[T]):
    """The result or error of a call, carried around Prefect, which only gets a state."""

    def __init__(self) -> None:
        self._value: list[T] = []
        self._error: Exception | None = None

    def capture(
        self, call: Callable[[], T], name: Callable[[T], str], message: Callable[[T], str | None] = lambda _: None
    ) -> State[Any]:
        """Make the call and return its end state: called `name(result)` with `message(result)`, or named after the
        error with the error's message."""
        try:
            value = call()
        except TetherError as error:
            self._error = error
            return Failed(name=type(error).__name__, message=redacted(str(error)))
        except Exception as error:  # a bug; `get` raises it again with its trace
            self._error = error
            return Failed(message=redacted(f"{type(error).__name__}: {error}"))
        self._value.append(value)
        return Completed(name=name(value), message=message(value))

    def get(self, state: State[Any] | None) -> T:
        """Return the call's result, or raise its error. `state` is the end state in Prefect; None if its server is
        gone.

        Raises:
            TetherError: Prefect did not let the call run (cancelled, or its server refused it or is gone).
        """
        if self._error is not None:
            raise self._error
        if not self._value:
            why = "its server does not answer" if state is None else f"it ended as {state.name}: {state.message}"
            raise TetherError(f"Prefect did not let it run: {why}. What is finished is stored; run the same again.")
        return self._value[0]


def show_in(ctx: RunContext, flow_run_id: str) -> None:
    """Show a run's stages and report on the pages of a flow run, on a server that outlives the run."""
    ctx.reporting = replace(ctx.reporting, flow_run=flow_run_id)
    logs.bind(flow_run=flow_run_id)
    ctx.status.name_page(_page("flow-run", flow_run_id))


def _page(kind: str, id_: object) -> str:
    return redacted(url_for(kind, str(id_)) or "")


def prefect_runner(ctx: RunContext) -> Callable[..., StageResult]:
    """Return a function that runs a stage as a task of the surrounding flow run, or without Prefect if it is away."""
    ended: dict[str, State[Any]] = {}
    def run(stage: Stage, job: Settings, inputs: Given) -> StageResult:
        if not is_answering():
            ctx.say(f"{stage.name}: Prefect's server does not answer; its pages will miss this stage")
            return run_stage(stage, job, inputs, ctx)
        outcome: Outcome[StageResult] = Outcome()

        # Inputs and results stay in this process: Prefect would traverse them and does not need them.
        @task(name=stage.name, task_run_name=stage.name, cache_policy=NO_CACHE, retries=0, persist_result=False)
        def run_one_stage() -> State[Any]:
            if ctx.reporting.flow_run:
                ctx.status.update(stage.group, prefect=_page("task-run", runtime.task_run.id))
            state = outcome.capture(
                lambda: run_stage(stage, job, inputs, ctx), lambda r: _NAMES.get(r.state, "Completed")
            )
            unless_gone(lambda: _show_gates(stage, ctx))
            return state

        made = {source.stage.name for source in inputs.values() if isinstance(source, StageResult)}
        upstream = [state for name, state in ended.items() if name in made]
        # If the task had tags, Prefect would ask the server for concurrency slots before and during its run.
        with TagsContext(current_tags=set()):
            state = unless_gone(lambda: run_one_stage(return_state=True, wait_for=upstream))
        result = outcome.get(state)
        if state is not None:
            ended[stage.name] = state  # for the edges in Prefect's graph
        return result

    return run


def flow_run_log(flow_run_id: str) -> Callable[[str], None]:
    """Return a function that adds a line to the log of a flow run, and of the current task run.

    Prefect's own loggers also print on the terminal and send in the background: with an embedded server their last
    lines are lost, and if it is gone they print errors. There are about two lines per stage.
    """

    def log(line: str) -> None:
        task_run = runtime.task_run.id
        entry = LogCreate(
            name="tether",
            level=logging.INFO,
            message=line,
            timestamp=datetime.now(UTC),
            flow_run_id=UUID(flow_run_id),
            task_run_id=UUID(task_run) if task_run else None,
        )

        tell_prefect(lambda client: client.create_logs([entry]))

    return log


def tell_prefect(call: Callable[[SyncPrefectClient], object]) -> None:
    """Make a call to Prefect's server, unless it is away."""

    def send() -> None:
        with get_client(sync_client=True) as client:
            call(client)

    if is_answering():
        unless_gone(send)


def unless_gone(call: Callable[[], T]) -> T | None:
    """Call Prefect and return the result; None if its server has gone away, so that computed results are not lost."""
    try:
        return call()
    except Exception as error:  # Prefect passes on its transport's errors, some of them wrapped
        if is_answering() and not is_away(error):
            raise
        return None


def _show_gates(stage: Stage, ctx: RunContext) -> None:
    result = ctx.results.get(stage.name)
    if result is None or not result.verdicts or not is_answering():
        return
    if tracker := ctx.tracker():
        tracker.settle([stage.group])
    create_markdown_artifact(
        stage_page(result, mlflow_page(ctx.home, ctx.run, stage.group), mlflow_page(ctx.home, ctx.run)),
        key=f"{stage.group.replace('_', '-')}-gates",
        description=f"Gates of {stage.group} in run {ctx.run}",
    )


def stage_page(result: StageResult, link: str | None, whole: str | None) -> str:
    """Return a judged stage as Markdown: its pages in MLflow (`link`, and that of the `whole` run), its main metrics,
    and its gates, failed ones first."""
    where = f"[its page]({link})" if link else "`tether status --json` names it, `tether ui` shows it"
    where += f" · [the whole run]({whole})" if whole else ""
    outcome, _ = verdict_in_short(result.verdicts)
    artifact = f"Artifact {markdown_code(result.digest[:16])}, {'from the store' if result.cached else 'computed'}."
    state = result.state.replace("_", " ").capitalize()
    lines = [f"**{state}.** {markdown(outcome)}. {artifact} MLflow run: {where}", ""]
    metrics = result.record.metrics
    if brief := brief_metrics(result.name, metrics):
        numbers = [f"| {markdown(name)} | {gate_text.number(metrics[name])} |" for name in brief]
        lines += ["### Numbers", "", "| metric | value |", "|---|---:|", *numbers, ""]
    verdicts = sorted(result.verdicts, key=lambda verdict: verdict.passed)
    return "\n".join([*lines, "### Gates", "", gate_text.markdown(verdicts)])


def show_report(ctx: RunContext) -> None:
    """Add the report of an ended run to its flow run as an artifact: its text, and links to the full report.

    Does nothing if the run has no flow run with pages or no report, or if the server is away.
    """
    path = ctx.folder / REPORT_TEXT
    if not ctx.reporting.flow_run or not path.is_file():
        return
    pages = {
        "Open the report with its charts": mlflow_page(ctx.home, ctx.run, file=REPORT),
        "the run in MLflow": mlflow_page(ctx.home, ctx.run),
        "download it": mlflow_file(ctx.home, ctx.run, REPORT),  # MLflow's pages are hard to use on a telephone
    }
    links = [f"[{text}]({url})" for text, url in pages.items() if url]
    where = f"Files: {markdown_code(str(ctx.folder))} on {platform.node()}"
    lineage = in_markdown(graph_of(readable_done(ctx.folder)[0]))
    artifact = ArtifactCreate(
        key="report",
        type="markdown",
        description=f"Report of run {ctx.run}",
        data=f"{' · '.join([*links, where])}\n\n{path.read_text(encoding='utf-8')}\n\n## Lineage\n\n{lineage}\n",
        flow_run_id=UUID(ctx.reporting.flow_run),
    )
    try:
        tell_prefect(lambda client: client.create_artifact(artifact))
    except Exception as error:  # a bug in a page must not end hours of computing
        ctx.say(f"Prefect did not take the report ({type(error).__name__}: {error})")


def wait_until_told(flow_run_id: str, seconds: float = 5.0) -> None:
    """Wait until the server has all task runs of the flow run as ended; otherwise the process could lose their
    states."""
    deadline = time.monotonic() + seconds
    of_flow_run = FlowRunFilter(id=FlowRunFilterId(any_=[UUID(flow_run_id)]))
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = client.read_task_runs(flow_run_filter=of_flow_run)
            if all(run.state is not None and run.state.is_final() for run in runs):
                return
            time.sleep(0.1)
