"""Starting a run: new, again from a stage, or taken up with people's labels."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.artifacts import ArtifactStore, Record
from components.errors import UserError
from components.gates import Waiver
from components.settings import Settings
from flows.config import RunConfig, check_config, to_values
from flows.profile import Override, apply_overrides
from flows.rlhf import pipeline, rlhf
from flows.sources import Sources, find_sources
from tasks.context import RunContext, refreshed
from tasks.result import Source, StageResult
from tasks.runner import peek, run_stage
from tasks.stages import PIPELINE, STAGES, Stage
from tasks.status import load_status


class Launch(NamedTuple):
    """A run that is begun but not computed."""

    ctx: RunContext
    config: RunConfig
    sources: Sources


def new_run(home: Path, profile: str, config: RunConfig, waivers: Sequence[Waiver] = ()) -> Launch:
    """A run of `config` (resolved). Nothing is written where an input is missing.

    Raises:
        UserError: an input can't be read, or a waiver names no gate.
    """
    sources = find_sources(config, home)
    ctx = RunContext.start(
        home,
        profile,
        config.gates,
        config=to_values(config),
        project=config.project,
        waivers=waivers,
        pools=config.pools,
    )
    return Launch(ctx, config, sources)


def rerun(
    home: Path, run: str | None, stage: str, overrides: Sequence[Override], waivers: Sequence[Waiver] = ()
) -> Launch:
    """A new run with the config of `run` (None: the newest) that computes `stage` again from that run's inputs.

    Raises:
        UserError: no such run or stage, or overrides that don't fit.
    """
    if stage not in PIPELINE:
        raise UserError(f"{stage}: no such stage; there are {', '.join(PIPELINE)}.")
    status = load_status(home, run)
    values = apply_overrides(run_values(home, status["run"]), overrides)
    config = check_config(values, source=f"run {status['run']}").resolved()
    sources = find_sources(config, home)
    ctx = RunContext.start(
        home,
        status["profile"],
        config.gates,
        config=to_values(config),
        project=config.project,
        waivers=waivers,
        pools=config.pools,
        refresh=refreshed([stage]),
        pinned=pinned(home, status, PIPELINE[: PIPELINE.index(stage)]),
    )
    return Launch(ctx, config, sources)


def scoring(home: Path, run: str | None, sheet: Path, waivers: Sequence[Waiver] = ()) -> Launch:
    """The run `run` (None: the newest) taken up again, to score the labels that people wrote into `sheet`.

    Raises:
        UserError: no such run or sheet, or a run that has no sample to label.
    """
    status = load_status(home, run)
    state = next(stage["state"] for stage in status["stages"] if stage["name"] == "human_eval")
    config = check_config(run_values(home, status["run"]), source=f"run {status['run']}")
    if config.human_eval.judges != "people" or state in ("not_run", "running", "interrupted"):
        raise UserError(
            f"run {status['run']} waits for no labels (human_eval: {state}, judges: {config.human_eval.judges}). "
            f"Name the run that does with --run."
        )
    sources = find_sources(config, home, sheet)
    ctx = RunContext.resume(
        home,
        status["run"],
        config.gates,
        waivers=waivers,
        pools=config.pools,
        profile=status["profile"],
        project=config.project,
        pinned=pinned(home, status, PIPELINE),
    )
    return Launch(ctx, config, sources)


def compute(launch: Launch) -> StageResult | None:
    """Go through the pipeline, and write the run's end down whatever it is.

    Returns:
        human_eval's result; None where the run waits for labels.

    Raises:
        UserError: a stage's runner is a pool, and there is no server or deployment for it. And what a stage raises.
    """
    ctx, config, sources = launch
    stored = everything_is_stored(config, sources, ctx)
    if not stored:
        from tasks.prefect_server import check_server, end_orphans

        end_orphans(ctx.home / "prefect" / "embedded")
        try:
            check_server(needed_for=config.pools)
        except UserError:
            ctx.discard()
            raise
    with ctx:
        if stored:
            result = pipeline(config, sources, lambda stage, job, inputs: run_stage(stage, job, inputs, ctx))
        else:
            result = rlhf(config, sources, ctx)
        return _waiting(ctx, result)


def compute_in_flow(launch: Launch) -> StageResult | None:
    """`compute`, each stage a task of the flow run that surrounds the call: a deployment's."""
    from tasks.prefect_stages import prefect_runner

    ctx, config, sources = launch
    with ctx:
        return _waiting(ctx, pipeline(config, sources, prefect_runner(ctx)))


def _waiting(ctx: RunContext, result: StageResult | None) -> StageResult | None:
    if result is None:
        ctx.await_labels()
        sheet = ctx.store.path(ctx.status.stage("human_eval")["digest"]) / "sheet.csv"
        (ctx.folder / "sheet.csv").write_bytes(sheet.read_bytes())
    return result


def report(launch: Launch) -> Path:
    """Write the run's report, whatever it ended as; returns the page."""
    from flows.report import write_report

    home, run = launch.ctx.home, launch.ctx.run
    return write_report(launch.ctx.folder, load_status(home, run), is_simulated(home, run))


class _Enough(Exception):
    """The look into the store has seen what it needs."""


def everything_is_stored(config: RunConfig, sources: Sources, ctx: RunContext) -> bool:
    """Whether this run has nothing to compute, up to its end or to the gate that will stop it."""
    missing: list[Stage] = []

    def look(stage: Stage, job: Settings, inputs: Mapping[str, StageResult | Source]) -> StageResult:
        found = peek(stage, job, inputs, ctx)
        if found is None:
            missing.append(stage)
        if found is None or found.state == "gate_failed":
            raise _Enough
        return found

    try:
        pipeline(config, sources, look)
    except _Enough:
        return not missing
    return True


def run_values(home: Path, run: str) -> dict[str, Any]:
    """The resolved config that a run was started with, as values."""
    return yaml.safe_load((home / "runs" / run / "config.yaml").read_text(encoding="utf-8"))


def pinned(home: Path, status: Mapping[str, Any], stages: Sequence[str]) -> dict[str, Record]:
    """The records that a run took for `stages`, by sub-stage: the inputs of what is computed again."""
    store = ArtifactStore(home)
    keys = {stage["name"]: stage["key"] for stage in status["stages"] if stage["key"] and stage["name"] in stages}
    found = [store.lookup(key) for key in keys.values()]
    return {each.stage: each for each in found if isinstance(each, Record) and each.stage in STAGES}


def is_simulated(home: Path, run: str) -> bool:
    """Whether a run's data are the built-in task's."""
    return run_values(home, run)["data"]["preferences"] is None
