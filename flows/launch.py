"""Starting a run: new, again from a stage, or taken up with people's labels."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from components.artifacts import ArtifactStore
from components.errors import UserError
from components.gates import Waiver
from components.settings import Settings
from flows.bases import Base, changed_before, choose_base, earlier_stages, run_values, standing
from flows.config import RunConfig, check_config, to_values
from flows.profile import Override, apply_overrides
from flows.rlhf import pipeline, rlhf
from flows.sources import Sources, find_sources
from tasks import journal
from tasks.context import RunContext, refreshed
from tasks.journal import REPORT
from tasks.result import Source, StageResult
from tasks.runner import peek, run_stage
from tasks.stages import PIPELINE, STAGES, Stage
from tasks.status import load_explanations, load_status, run_of_flow

logger = logging.getLogger(__name__)


class Launch(NamedTuple):
    """A run that is begun but not computed."""

    ctx: RunContext
    config: RunConfig
    sources: Sources
    notes: Sequence[str] = ()
    """What to tell the user first."""


def new_run(
    home: Path,
    profile: str,
    config: RunConfig,
    waivers: Sequence[Waiver] = (),
    refresh: Sequence[str] = (),
    flow_run: str | None = None,
) -> Launch:
    """A run of `config` (resolved). Nothing is written where an input is missing.

    Args:
        home: the `TETHER_HOME`.
        profile: what the run is called after.
        config: all that it is asked to do.
        waivers: gates that may fail.
        refresh: stages to compute though the store has them.
        flow_run: the Prefect flow run that begins it; tried again, it takes up the run that it began.

    Raises:
        UserError: an input can't be read, or a waiver or `refresh` names nothing that there is.
    """
    check_stages("--refresh", refresh)
    sources = find_sources(config, home)
    origin = {"flow_run": flow_run} if flow_run else {}
    return Launch(_begin(home, profile, config, origin, waivers, refresh=refreshed(refresh)), config, sources)


def rerun(
    home: Path,
    stage: str,
    run: str | None = None,
    overrides: Sequence[Override] = (),
    config: RunConfig | None = None,
    profile: str | None = None,
    waivers: Sequence[Waiver] = (),
    refresh: Sequence[str] = (),
    flow_run: str | None = None,
) -> Launch:
    """A new run that takes all that comes before `stage` as an earlier run's artifacts, and computes `stage` again.

    Args:
        home: the `TETHER_HOME`.
        stage: one of the pipeline's.
        run: the earlier run; None takes the newest whose artifacts before `stage` all stand in the store.
        overrides: changes to that run's config.
        config: the config in the place of that run's (not resolved); then only a run that agrees with it will do.
        profile: what the run is called after, in the place of that run's.
        waivers, refresh, flow_run: as `new_run`; later stages alone can be refreshed.

    Raises:
        UserError: no such run or stage, nothing that stands, or changes to what comes before the stage.
    """
    check_stages("rerun", [stage])
    check_stages("--refresh", refresh)
    before = earlier_stages(stage)
    if early := [name for name in refresh if STAGES[name].shown in before]:
        raise UserError(f"--refresh {early[0]}: it comes before {stage}. Rerun from there: `tether rerun {early[0]}`.")
    tried = run_of_flow(home, flow_run) if flow_run else None
    if tried is not None:  # the earlier attempt has chosen
        run = load_explanations(home, tried)["origin"]["from"]
    base = choose_base(home, stage, run, config)
    notes = [f"{stage} again from run {base.run}" + (f" ({base.instead})" if base.instead else "")]
    if misfits := base.config.runtime.misfits():
        kept = f"; {', '.join(before)} are taken as they are" if before else ""
        notes.append(
            f"run {base.run} was resolved for another machine ({'; '.join(misfits)}): what is computed now is resolved "
            f"for this one{kept}"
        )
    if config is None:
        values = {**base.values, "runtime": {}} if misfits else base.values
        config = check_config(apply_overrides(values, overrides), source=f"run {base.run}")
        _refuse_changes_before(stage, base, config)
    config = config.resolved()
    if base.config.seed != config.seed and before:
        notes.append(f"seed {config.seed} is for {stage} and what follows; {', '.join(before)} are taken as they are")
    sources = find_sources(config, home, taken=base.records)
    origin = {"stage": stage, "from": base.run, **({"flow_run": flow_run} if flow_run else {})}
    options = {"refresh": refreshed([stage, *refresh]), "pinned": base.records}
    return Launch(_begin(home, profile or base.profile, config, origin, waivers, **options), config, sources, notes)


def _begin(
    home: Path, profile: str, config: RunConfig, origin: Mapping[str, str], waivers: Sequence[Waiver], **options: Any
) -> RunContext:
    """Begin a run, or take up the one that the same flow run began before it was tried again."""
    options |= {"project": config.project, "pools": config.pools, "waivers": waivers, "at_end": write_reports}
    tried = run_of_flow(home, origin["flow_run"]) if "flow_run" in origin else None
    if tried is not None:
        return RunContext.resume(home, tried, config.gates, profile=profile, **options)
    return RunContext.start(home, profile, config.gates, config=to_values(config), origin=origin, **options)


def check_stages(what: str, stages: Iterable[str]) -> None:
    """Raises `UserError` if one of `stages` is none of the pipeline's."""
    for stage in stages:
        if stage not in PIPELINE:
            raise UserError(f"{what} {stage}: no such stage; there are {', '.join(PIPELINE)}.")


def _refuse_changes_before(stage: str, base: Base, config: RunConfig) -> None:
    changed = changed_before(stage, base.config, config)
    if changed:
        field, first = next(iter(changed.items()))
        raise UserError(
            f"--set {field}: {first} depends on it, and comes before {stage}: it would be taken from run {base.run} as "
            f"it is. Rerun from there: `tether rerun {first} --from {base.run} --set {field}=...`."
        )


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
    records, _ = standing(ArtifactStore(home), status, PIPELINE)
    sources = find_sources(config, home, sheet, taken=records)
    ctx = RunContext.resume(
        home,
        status["run"],
        config.gates,
        waivers=[*journal.waivers(home / "runs" / status["run"]), *waivers],  # what was waived in this run still is
        pools=config.pools,
        profile=status["profile"],
        project=config.project,
        pinned=records,
        at_end=write_reports,
    )
    return Launch(ctx, config, sources)


def compute(launch: Launch) -> StageResult | None:
    """Go through the pipeline, and write the run's end down whatever it is.

    Returns:
        human_eval's result; None where the run waits for labels.

    Raises:
        UserError: a stage's runner is a pool, and there is no server or deployment for it. And what a stage raises.
    """
    ctx, config, sources, notes = launch
    stored = everything_is_stored(config, sources, ctx)
    if not stored:
        from tasks.prefect_server import check_server, end_orphans

        end_orphans(ctx.home / "prefect" / "embedded")
        try:
            computed = {stage: pool for stage, pool in config.pools.items() if stage not in ctx.pinned}
            check_server(needed_for=computed)
        except UserError:
            ctx.discard()
            raise
    with ctx:
        _say(ctx, notes)
        if stored:
            result = pipeline(config, sources, lambda stage, job, inputs: run_stage(stage, job, inputs, ctx))
        else:
            result = rlhf(config, sources, ctx)
        return _waiting(ctx, result)


def compute_in_flow(launch: Launch) -> StageResult | None:
    """`compute`, each stage a task of the flow run that surrounds the call: a deployment's."""
    from tasks.prefect_stages import prefect_runner

    ctx, config, sources, notes = launch
    with ctx:
        _say(ctx, notes)
        return _waiting(ctx, pipeline(config, sources, prefect_runner(ctx)))


def _say(ctx: RunContext, notes: Sequence[str]) -> None:
    for note in notes:
        ctx.say(note)


def _waiting(ctx: RunContext, result: StageResult | None) -> StageResult | None:
    if result is None:
        ctx.await_labels()
        sheet = ctx.store.path(ctx.status.stage("human_eval")["digest"]) / "sheet.csv"
        (ctx.folder / "sheet.csv").write_bytes(sheet.read_bytes())
    return result


def write_reports(ctx: RunContext) -> None:
    """Write what a run leaves for people, however it ended: `report.md`, `report.html`, and its models' cards."""
    from flows.card import write_cards
    from flows.report import write_report
    from flows.run_page import write_page

    write_report(ctx.folder, load_status(ctx.home, ctx.run), is_simulated(ctx.home, ctx.run))
    for name, write, again in (
        ("cards", lambda: write_cards(ctx), f"`tether card {ctx.run}` makes one again"),
        (REPORT, lambda: write_page(ctx.home, ctx.run), f"`tether report {ctx.run}` tries again"),
    ):
        try:
            write()
        except OSError:
            raise  # the disk's, and so for the user to mend
        except Exception as error:  # hours of computing are not to end in a page's mistake
            logger.debug(name, exc_info=True)
            ctx.say(f"{ctx.folder / name} could not be written ({error!r}); {again}")


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


def is_simulated(home: Path, run: str) -> bool:
    """Whether a run's data are the built-in task's."""
    return run_values(home, run)["data"]["preferences"] is None
