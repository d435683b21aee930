"""The RLHF pipeline from top to bottom: five stages, each with its gates.

The `run` argument decides where a stage is computed: in this process, as a Prefect task, or on a worker.
It handles the whole life of the stage (build the key, look it up, compute, publish, record, judge the gates) and raises
GateFailed if a gate stops the pipeline, so no later stage starts. `components/gates/table.py` lists each stage's gates.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from threading import Thread
from typing import Any, Protocol

from components.base.settings import Settings
from components.human_eval.sheet import SIMULATED
from data_contracts.expectations.suites import great_expectations
from flows.config.run_config import RunConfig
from flows.sources import Sources
from tasks.execution import plots
from tasks.execution.context import RunContext
from tasks.execution.runner import run_stage
from tasks.result import Given, Input, StageResult
from tasks.stages import COMPARISON, STAGES, Stage


class StageRunner(Protocol):
    """Runs one stage and judges it by its gates."""

    def __call__(self, stage: Stage, job: Settings, inputs: Given) -> StageResult: ...


class _Reached(Exception):
    """Ends the pipeline after the stage named by `until`. The argument is that stage's result."""


def pipeline(config: RunConfig, sources: Sources, run: StageRunner, until: str = "") -> StageResult | None:
    """Run the five stages in order, or the comparison if `sources.compared` names models.

    Args:
        config: the run's config, resolved for the machine that computes.
        sources: the external inputs.
        run: runs one stage.
        until: the last stage to run, as `PIPELINE` names it; empty to run all of them.

    Returns:
        The result of the last stage that ran; None if the run now waits for people's labels.

    Raises:
        GateFailed: a gate stopped the pipeline.
        UserError: an option or input is wrong. Other errors of a stage are passed on unchanged.
    """

    def stage(name: str, **inputs: StageResult | Input) -> StageResult:
        result = run(STAGES[name], config.stage_job(STAGES[name]), inputs)
        if STAGES[name].final and STAGES[name].shown == until:
            raise _Reached(result)
        return result

    try:
        if sources.compared:
            return comparison(config, sources, run)
        return _stages(config, sources, stage)
    except _Reached as reached:
        return reached.args[0]


def _stages(config: RunConfig, sources: Sources, stage: Callable[..., StageResult]) -> StageResult | None:
    """Run all stages in order and return the last result. `stage(name, **inputs)` runs one stage."""
    # If the config asks for an independent judge: a reward model of other labels, which is never used as a reward.
    judged = config.data.has_judge

    # 1. Validate: read preferences and demonstrations, quarantine bad rows, split by prompt.
    judge_data = stage("validate.judge", **sources.judge, **sources.contract, **sources.base) if judged else None
    data = stage("validate", **sources.data, **sources.base)

    # 2. SFT: imitate the demonstrations. The SFT model is PPO's initial policy, its reference and the baseline of human
    # evaluation. A later round keeps the first round's SFT model, and passes the data that it was trained on.
    sft = stage("sft", data=sources.taught or data, **sources.base)

    # 3. Reward: learn from pairs which of two responses people prefer, with calibrated probabilities.
    given = {} if judge_data is None else {"judge_data": judge_data}
    judge = stage("reward.judge", data=data, sft=sft, **given, **sources.previous) if given else None
    reward = stage("reward", data=data, sft=sft, **sources.previous, **sources.suites)

    # 4. PPO: maximise the reward (the reward model's, or that of `ppo.rewards`), with a KL penalty towards SFT. Only
    # the evaluations use the judge.
    asked = {} if judge is None else {"judge": judge}
    policy = stage("ppo", data=data, sft=sft, reward=reward, **sources.rewards, **asked)

    # 5. Human evaluation: compare the policy with SFT, blind, and check that the reward model still agrees with the
    # judges. Only a policy that passes here is promoted.
    sample = stage("human_eval.sample", data=data, sft=sft, ppo=policy, **sources.blinding)
    sheet = ratings(config, sources, sample)
    if sheet is None:
        return None
    scores = stage("human_eval.reward", sample=sample, reward=reward)
    return stage("human_eval", sample=sample, scores=scores, sheet=sheet)


def comparison(config: RunConfig, sources: Sources, run: StageRunner) -> StageResult | None:
    """Compare existing models, blind, without running the pipeline. Returns and raises what `pipeline` does."""

    def stage(name: str, **inputs: StageResult | Input) -> StageResult:
        return run(COMPARISON[name], config.stage_job(COMPARISON[name]), inputs)

    sample = stage("human_eval.compare", **sources.compared, **sources.blinding)
    sheet = ratings(config, sources, sample)
    return None if sheet is None else stage("human_eval.compared", sample=sample, sheet=sheet)


def ratings(config: RunConfig, sources: Sources, sample: StageResult) -> Input | None:
    """Return the filled rating sheet: people's if given, otherwise the simulated judges', or None if people must still
    rate."""
    if sources.sheet is not None:
        return sources.sheet
    if config.human_eval.judges == "simulated":
        return Input.of(sample.path / SIMULATED)
    return None


def rlhf(config: RunConfig, sources: Sources, ctx: RunContext) -> StageResult | None:
    """Run the pipeline as a Prefect flow, each stage as a task, and return its result. Raises as `pipeline` does."""
    # Imported here, because a run whose stages are all stored never gets here and should not wait for it.
    from tasks.prefect_flow.server import NoServer, own_server

    ahead = Thread(target=_load_ahead, args=(ctx,), daemon=True)
    if os.environ.get("PREFECT_API_URL"):
        return _in_flow(config, sources, ctx, ahead)
    ahead.start()  # the server takes about 10 s to start; the imports use that time
    with ExitStack() as stack:
        try:
            stack.enter_context(own_server(ctx.home))
        except NoServer as error:
            ctx.say(f"Prefect's server did not start ({error}); the run continues without Prefect's pages")
            ahead.join()
            return pipeline(config, sources, partial(run_stage, ctx=ctx), ctx.until)
        return _in_flow(config, sources, ctx, ahead)


def _in_flow(config: RunConfig, sources: Sources, ctx: RunContext, ahead: Thread) -> StageResult | None:
    """Run the flow on a reachable Prefect server. Stages start after the thread `ahead` has finished."""
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

    outcome: Outcome[StageResult | None] = Outcome()
    flow_run_ids: list[str] = []
    label, own = ctx.status.label, ahead.ident is not None  # is the server our own?

    def shown() -> str:
        return f"{label.name} ({ctx.profile} {ctx.run})" if label.name else f"{ctx.profile} {ctx.run}"

    @flow(name="rlhf", flow_run_name=shown, retries=0, persist_result=False)
    def rlhf_flow(run: str, profile: str) -> State[Any]:
        flow_run_ids.append(flow_run.id)
        ctx.log = flow_run_log(flow_run.id)
        if not own:
            show_in(ctx, flow_run.id)
        if ahead.is_alive():
            ahead.join()
        with nullcontext() if own else saying_that_it_lives(flow_run.id):
            return outcome.capture(
                lambda: pipeline(config, sources, prefect_runner(ctx), ctx.until),
                name=lambda result: "AwaitingLabels" if result is None else "Completed",
                message=lambda result: awaiting(ctx.folder) if result is None else None,
            )

    settings: dict[Any, Any] = {PREFECT_API_URL: os.environ["PREFECT_API_URL"]}
    if own:  # an own server that died stays dead, so do not wait at every call
        settings |= {PREFECT_CLIENT_MAX_RETRIES: 1, PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}
    else:
        settings |= {
            PREFECT_FLOWS_HEARTBEAT_FREQUENCY: HEARTBEAT_SECONDS,
            PREFECT_CLIENT_MAX_RETRIES: 6,  # about two minutes, because a person may be waiting
            PREFECT_CLIENT_RETRY_EXTRA_CODES: PATIENCE["PREFECT_CLIENT_RETRY_EXTRA_CODES"],
        }
    with temporary_settings(settings), tags(TAG, *label.written):
        state = unless_gone(lambda: rlhf_flow(run=ctx.run, profile=ctx.profile, return_state=True))
        for flow_run_id in flow_run_ids:
            unless_gone(partial(wait_until_told, flow_run_id))
    ctx.log = None
    return outcome.get(state)


def _load_ahead(ctx: RunContext) -> None:
    """Load what would cost the stages seconds: MLflow's tables, and the libraries that check data, train and plot."""
    ctx.tracker()
    with suppress(ImportError):  # the stage that needs the library reports the error
        for stage in STAGES.values():
            stage.load_run()
        great_expectations()
        plots.load()
