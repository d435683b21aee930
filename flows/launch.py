"""Starting a run: new, again from a stage, or taken up with people's labels."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import TetherError, UserError
from components.base.files import write_whole
from components.base.nested import group
from components.base.settings import Settings
from components.gates.judging import GatesConfig, Waiver
from components.store.store import ArtifactStore
from flows import people
from flows.base_run import changed_before, choose_base, earlier_stages, standing
from flows.config.profiles import Override, apply_overrides
from flows.config.run_config import RunConfig, check_config, check_kl_is_judged, to_values
from flows.data.rates import with_rates
from flows.rlhf import pipeline, rlhf
from flows.sources import Sources, compared_sources, find_sources, kept_sft
from tasks.execution.attempts import Attempts
from tasks.execution.context import RunContext, refreshed
from tasks.execution.runner import peek, run_stage
from tasks.result import Given, Input, StageResult
from tasks.runs.config import run_values
from tasks.runs.journal import REPORT
from tasks.runs.label import UNNAMED, Label
from tasks.runs.status import load_status, run_of_flow
from tasks.stages import PIPELINE, STAGES, Stage
from tasks.tracking.client import check_access

logger = logging.getLogger(__name__)


MOST = 8
"""Gates that a line names."""


COMPARISON = "comparison.md"
"""What came of a comparison of models, in a run's folder."""


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
    label: Label = UNNAMED,
    user: str | None = None,
) -> Launch:
    """A run of `config` (resolved). Nothing is written where an input is missing.

    Args:
        profile: what the run is called after.
        refresh: stages to compute though the store has them.
        flow_run: the Prefect flow run that begins it; tried again, it takes up the run that it began.
        user: who asked for it, for the record; None is who runs this process.

    Raises:
        UserError: an input can't be read, a waiver or `refresh` names nothing that there is, or MLflow refuses us.
    """
    check_stages("--refresh", refresh)
    check_kl_is_judged(config, profile)
    config, notes = with_rates(people.with_guidelines(config), home)
    kept = kept_sft(config, home)
    sources = find_sources(config, home, taken=kept)
    origin = round_of(config) | ({"flow_run": flow_run} if flow_run else {})
    options = {"refresh": refreshed(refresh), "pinned": kept, **_by(user)}
    ctx = _begin(home, profile, config, origin, label, waivers, **options)
    return Launch(ctx, config, sources, notes + unnamed_gates(config))


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
    label: Label = UNNAMED,
    user: str | None = None,
) -> Launch:
    """A new run that takes all that comes before `stage` as an earlier run's artifacts, and computes `stage` again.

    Args:
        run: the earlier run; None takes the newest whose artifacts before `stage` all stand in the store.
        overrides: changes to that run's config.
        config: the config in the place of that run's (not resolved); then only a run that agrees with it will do.
        profile: what the run is called after, in the place of that run's.
        waivers, refresh, flow_run, label, user: as `new_run`; later stages alone can be refreshed.

    Raises:
        UserError: no such run or stage, nothing that stands, or changes to what comes before the stage.
    """
    check_stages("rerun", [stage])
    check_stages("--refresh", refresh)
    before = earlier_stages(stage)
    if early := [name for name in refresh if STAGES[name].shown in before]:
        raise UserError(f"--refresh {early[0]}: it comes before {stage}. Rerun from there: `tether rerun {early[0]}`.")
    config, chosen = (None, []) if config is None else with_rates(config, home)
    tried = run_of_flow(home, flow_run) if flow_run else None
    if tried is not None:  # the earlier attempt has chosen
        run = load_status(home, tried).origin["from"]
    base = choose_base(home, stage, run, config)
    notes = [f"{stage} again from run {base.run}" + (f" ({base.instead})" if base.instead else ""), *chosen]
    if misfits := base.config.runtime.misfits():
        kept = f"; {', '.join(before)} are taken as they are" if before else ""
        notes.append(
            f"run {base.run} was resolved for another machine ({'; '.join(misfits)}): what is computed now is resolved "
            f"for this one{kept}"
        )
    if config is None:
        values = {**base.values, "runtime": {}} if misfits else base.values
        config = check_config(apply_overrides(values, overrides), source=f"run {base.run}")
        for field, first in changed_before(stage, base.config, config).items():
            raise UserError(
                f"--set {field}: {first} depends on it, and comes before {stage}: it would be taken from run "
                f"{base.run} as it is. Rerun from there: `tether rerun {first} --from {base.run} --set {field}=...`."
            )
    check_kl_is_judged(config, f"run {base.run}")
    config, chosen = with_rates(people.with_guidelines(config).resolved(), home)
    notes += chosen
    if base.config.seed != config.seed and before:
        notes.append(f"seed {config.seed} is for {stage} and what follows; {', '.join(before)} are taken as they are")
    pinned = base.records if "sft" in base.records or stage == "sft" else base.records | kept_sft(config, home)
    sources = find_sources(config, home, taken=pinned)
    origin = round_of(config) | {"stage": stage, "from": base.run, **({"flow_run": flow_run} if flow_run else {})}
    options = {"refresh": refreshed([stage, *refresh]), "pinned": pinned, **_by(user)}
    ctx = _begin(home, profile or base.profile, config, origin, label, waivers, **options)
    return Launch(ctx, config, sources, notes + unnamed_gates(config))


def round_of(config: RunConfig) -> dict[str, str]:
    """What a round of `tether iterate` has in its run's origin: its number, and whose policy people judged last."""
    votes = config.data.votes
    return {"round": str(len(votes)), "votes": votes[-1]} if votes else {}


OF_RATERS = ("labels_complete", "items", "fleiss_kappa", "position_bias", "self_agreement_low", "raters_alike")
"""The gates of human_eval that judge a comparison: it says which model is better, and promotes none."""


def compare(
    home: Path,
    models: Sequence[str],
    run: str | None = None,
    overrides: Sequence[Override] = (),
    waivers: Sequence[Waiver] = (),
    label: Label = UNNAMED,
    user: str | None = None,
) -> Launch:
    """A run that compares two or more models, the first the baseline, on the held-out prompts of an earlier run.

    Args:
        models: as `find_compared` takes them.
        run: the run whose prompts and config it takes; None the newest whose data stand in the store.
        overrides: changes to that config.
        waivers, label, user: as `new_run`.

    Raises:
        UserError: no such models or run, or changes to how that run's data were made.
    """
    from flows.models.compared import COMPARED, as_origin, find_compared

    found = find_compared(home, models)
    base = choose_base(home, "sft", run)
    values = {**base.values, "runtime": {}} if base.config.runtime.misfits() else base.values
    config = check_config(apply_overrides(values, overrides), source=f"run {base.run}")
    for field in changed_before("sft", base.config, config):
        raise UserError(f"--set {field}: the prompts are those of run {base.run}, made without it. Take it out.")
    named = config.gates.model_dump().get("human_eval", {})
    gates = GatesConfig.model_validate({"human_eval": {name: named[name] for name in OF_RATERS if name in named}})
    config = config.model_copy(update={"gates": gates}).resolved()
    data, store = base.records["validate"], ArtifactStore(home)
    compared = {"data": Input(digest=data.digest, path=store.path(data), stage="validate", stored=True), **found}
    sources = compared_sources(config, home, compared)
    origin = {"stage": "human_eval", "from": base.run, COMPARED: as_origin(models, compared)}
    ctx = _begin(home, base.profile, config, origin, label, waivers, **_by(user))
    note = f"{' against '.join(models)} on held-out prompts of run {base.run}; the first is the baseline"
    return Launch(ctx, config, sources, [note])


def _begin(
    home: Path, profile: str, config: RunConfig, origin: Mapping[str, str], label: Label, waivers: Sequence[Waiver],
    **options: Any,
) -> RunContext:  # fmt: skip
    """Begin a run, or take up the one that the same flow run began before it was tried again."""
    check_access(home)
    options |= {"project": config.project, "waivers": waivers, "at_end": write_reports, **_execution(config)}
    tried = run_of_flow(home, origin["flow_run"]) if "flow_run" in origin else None
    if tried is not None:
        return RunContext.resume(home, tried, config.gates, profile=profile, **options)
    return RunContext.start(
        home, profile, config.gates, config=to_values(config), origin=origin, label=label, **options
    )


def _by(user: str | None) -> dict[str, str]:
    return {} if user is None else {"user": user}


def _execution(config: RunConfig) -> dict[str, Any]:
    """Who computes the stages, how long at most, and how often again: what a run's context takes from its config."""
    attempts = Attempts(config.retries, config.retry_seconds)
    return {"pools": config.pools, "timeouts": config.timeouts, "attempts": attempts,
            "prices": config.hourly_prices, "currency": config.prices.currency}  # fmt: skip


def unnamed_gates(config: RunConfig) -> list[str]:
    """A line that says which gates are off because the config does not name them; none where it names all."""
    off = config.gates.unnamed
    named = f"{', '.join(off[:MOST])}{f' and {len(off) - MOST} more' if len(off) > MOST else ''}"
    gates, them = ("1 gate is", "it") if len(off) == 1 else (f"{len(off)} gates are", "them")
    return [f"{gates} off because the profile does not name {them}: {named}"] if off else []


def check_stages(what: str, stages: Iterable[str]) -> None:
    """Raises `UserError` if one of `stages` is none of the pipeline's."""
    for stage in stages:
        if stage not in PIPELINE:
            raise UserError(f"{what} {stage}: no such stage; there are {', '.join(PIPELINE)}.")


def scoring(
    home: Path,
    run: str | None,
    sheets: Path | Sequence[Path],
    waivers: Sequence[Waiver] = (),
    user: str | None = None,
) -> Launch:
    """The run `run` (None: the newest) taken up again, to score the labels that people wrote into `sheets`.

    Args:
        sheets: the joint sheet, several raters' own files, or a folder of them; joined, the run's `labels.csv`.
        user: as in `new_run`.

    Raises:
        UserError: no such run or sheet, or a run that has no sample to label. Mistakes: all that is wrong in the files.
    """
    from flows.models.compared import of_origin

    status = load_status(home, run)
    state = status.stage("human_eval").state
    config = check_config(run_values(home, status.run), source=f"run {status.run}")
    if config.human_eval.judges != "people" or state in ("not_run", "running", "interrupted"):
        raise UserError(
            f"run {status.run} waits for no labels (human_eval: {state}, judges: {config.human_eval.judges}). "
            f"Name the run that does with --run."
        )
    check_access(home)
    records, _ = standing(ArtifactStore(home), status, PIPELINE)
    compared = of_origin(home, status.origin)
    sample = records.get("human_eval.compare" if compared else "human_eval.sample")
    sheet = people.joined(home / "runs" / status.run, ArtifactStore(home), sample, sheets)
    if compared:
        sources = compared_sources(config, home, compared, sheet, records)
    else:
        sources = find_sources(config, home, sheet, taken=records)
    ctx = RunContext.resume(
        home,
        status.run,
        config.gates,
        # What was waived in this run still is, if somebody here has done it.
        waivers=[*([] if status.imported else status.waivers), *waivers],
        profile=status.profile,
        project=config.project,
        pinned=records,
        at_end=write_reports,
        **_execution(config),
        **_by(user),
    )
    return Launch(ctx, config, sources, unnamed_gates(config))


def sample_of(home: Path, run: str | None) -> Path:
    """The batch that people judge in a run (None: the newest): its sample artifact in the store.

    Raises:
        UserError: no such run, or it has no batch for people, or the store has lost it.
    """
    status = load_status(home, run)
    config = check_config(run_values(home, status.run), source=f"run {status.run}")
    record = standing(ArtifactStore(home), status, PIPELINE)[0].get("human_eval.sample")
    folder = None if record is None else ArtifactStore(home).path(record)
    if config.human_eval.judges != "people" or folder is None or not (folder / "sheet.json").is_file():
        raise UserError(f"run {status.run} has no batch for people to judge. Name a run that awaits labels.")
    return folder


def compute(launch: Launch) -> StageResult | None:
    """Go through the pipeline, and write the run's end down whatever it is.

    Returns:
        human_eval's result; None where the run waits for labels.

    Raises:
        UserError: a stage's runner is a pool, and there is no server or deployment for it. And what a stage raises.
    """
    ctx, config, sources, _ = launch
    if not everything_is_stored(config, sources, ctx):
        from tasks.prefect_flow.server import check_server, end_orphans

        end_orphans(ctx.home / "prefect" / "embedded")
        try:
            check_server(needed_for={stage: pool for stage, pool in config.pools.items() if stage not in ctx.pinned})
        except TetherError:
            ctx.discard()
            raise
        try:
            return _go(launch, lambda: rlhf(config, sources, ctx))
        finally:
            if ctx.flow_run:
                from tasks.prefect_flow.stages import show_report

                show_report(ctx)
    return _go(launch, lambda: pipeline(config, sources, partial(run_stage, ctx=ctx)))


def compute_in_flow(launch: Launch, flow_run: str) -> StageResult | None:
    """`compute`, each stage a task of the flow run that surrounds the call: a deployment's."""
    from tasks.prefect_flow.stages import prefect_runner, show_in, show_report

    ctx = launch.ctx
    show_in(ctx, flow_run)
    try:
        return _go(launch, lambda: pipeline(launch.config, launch.sources, prefect_runner(ctx)))
    finally:
        show_report(ctx)


def _go(launch: Launch, work: Callable[[], StageResult | None]) -> StageResult | None:
    with launch.ctx as ctx:
        for note in launch.notes:
            ctx.say(note)
        if (result := work()) is None:
            ctx.end_stage("human_eval", "awaiting_labels")
            people.give_out(ctx.store.path(ctx.status.stage("human_eval").digest or ""), ctx.folder)
        elif launch.sources.compared:
            from flows.models.compared import compared_names, result_text

            told = result_text(result.path, compared_names(load_status(ctx.home, ctx.run).origin))
            write_whole(ctx.folder / COMPARISON, told)
    if result is None:
        people.begin_waiting(ctx.home, ctx.run, ctx.say)
    return result


def write_reports(ctx: RunContext) -> None:
    """Write what a run leaves for people, however it ended: `report.md`, `report.html`, and its models' cards."""
    from flows.models.card import write_cards
    from flows.reports.links import links
    from flows.reports.page import write_page
    from flows.reports.terminal import markdown

    status = load_status(ctx.home, ctx.run)
    text = markdown(status, what_is_simulated(ctx.home, ctx.run), links(ctx.home, status))
    write_whole(ctx.folder / "report.md", text)
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
    """The look into the store has seen what it needs; its argument says whether all of that is stored."""


def everything_is_stored(config: RunConfig, sources: Sources, ctx: RunContext) -> bool:
    """Whether this run has nothing to compute, up to its end or to the gate that will stop it."""

    def look(stage: Stage, job: Settings, inputs: Given) -> StageResult:
        found = peek(stage, job, inputs, ctx)
        if found is None or found.state == "gate_failed":
            raise _Enough(found is not None)
        return found

    try:
        pipeline(config, sources, look)
    except _Enough as enough:
        return bool(enough.args[0])
    return True


def what_is_simulated(home: Path, run: str) -> str:
    """The sentence that says what of a run is simulated, as far as its config can be read; empty where nothing is."""
    from flows.reports.terminal import simulated_note

    try:
        values = run_values(home, run)
    except UserError as error:
        logger.warning("%s Whether the run's data are simulated isn't known.", error)
        return ""
    generated = group(values, "data").get("preferences", "") is None
    return simulated_note(generated, group(values, "human_eval").get("judges") == "people")
