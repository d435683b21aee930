"""Begin a new run, or a rerun from a stage."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.base.text import counted
from components.data.formats.labels import KTO
from components.data.inputs import of_kind
from components.gates.methods import DIRECT_METHODS, is_used
from data_contracts.rows.gather import RowSource, detected
from flows.base_run import Base, changed_before, choose_base, earlier_stages
from flows.config.profiles import Override, apply_overrides, profile_name
from flows.config.run_config import RunConfig, check_config, check_kl_limits, file_values, to_values
from flows.data.default_rates import with_rates
from flows.data.pretrained import pinned_base, with_template
from flows.data.reference import resolved_reference
from flows.data.reward_sources import has_unversioned, settled_rewards
from flows.data.run_plugins import settled_gates, settled_readers
from flows.launch.reports import write_reports
from flows.launch.request import DEFAULTS, Request
from flows.people.rater_sheets import with_guidelines
from flows.sources import Sources, find_sources, kept_sft
from tasks.allowed import refuse_outside
from tasks.execution.attempts import Attempts
from tasks.execution.context import NO_PINS, Execution, Reporting, Reuse, RunContext, refreshed
from tasks.result import Input
from tasks.runs.config import profile_values
from tasks.runs.status import load_status, run_of_flow
from tasks.stages import OPTIONAL, PIPELINE, STAGES, reaches
from tasks.tracking.mlflow_client import check_access

MOST = 8
"""The largest number of gates that a line names."""


_KNOWN = (*PIPELINE, *(name for name in STAGES if name not in PIPELINE))
"""The pipeline's stages, then their sub-stages."""


class Launch(NamedTuple):
    """A run that has been recorded but not computed."""

    ctx: RunContext
    config: RunConfig
    sources: Sources
    notes: Sequence[str] = ()
    """Lines to tell the user before computing."""


def new_run(
    home: Path, profile: str, config: RunConfig, request: Request = DEFAULTS, like: str | None = None
) -> Launch:
    """Begin a run of `config` and return it, not yet computed. If an input is missing, nothing is written.

    Args:
        profile: a profile's name or file; its name is in the run's id.
        like: an earlier run whose profile this run has.

    Raises:
        UserError: an input can't be read; `request` names an unknown stage or gate, or ends the run before a stage that
            it refreshes; or MLflow refuses access.
    """
    check_stages("--refresh", request.refresh)
    _check_end(request.until, request.refresh)
    refuse_outside(config, home)
    # Its limits were compared where it was made: in `load_config`, `form.changed` or `next_round`.
    check_kl_limits(config, profile, before=config)
    _check_stages_of("--refresh", request.refresh, config)
    return _prepare(home, profile, config, request, like=like)


def rerun(
    home: Path,
    stage: str,
    run: str | None = None,
    overrides: Sequence[Override] = (),
    config: RunConfig | None = None,
    profile: str | None = None,
    request: Request = DEFAULTS,
) -> Launch:
    """Begin a run that recomputes `stage` and reuses an earlier run's artifacts of the stages before it.

    Args:
        run: the earlier run; None takes the newest one whose artifacts before `stage` are all in the store.
        overrides: changes to that run's config.
        config: a config (not resolved) to use instead of that run's; then only a run that agrees with it is suitable.
        profile: the name in the run's id; None takes that run's profile.
        request: only `stage` and later stages can be refreshed.

    Raises:
        UserError: there is no such run or stage, no run is suitable, or `overrides` change what an earlier stage
            depends on.
    """
    computed = [stage, *request.refresh]
    check_stages("rerun", [stage])
    check_stages("--refresh", request.refresh)
    _check_end(request.until, computed)
    before = earlier_stages(stage)
    if early := [name for name in request.refresh if STAGES[name].group in before]:
        raise UserError(f"--refresh {early[0]}: it comes before {stage}. Rerun from there: `tether rerun {early[0]}`.")
    notes: list[str] = []
    if config is not None:
        refuse_outside(config, home)
        config, notes = _settled(settled_readers(config), home)
        if "ppo" in before:  # the earlier run's config holds what these sources were at the time
            config, _ = settled_rewards(config, home)
    earlier_attempt = run_of_flow(home, request.flow_run) if request.flow_run else None
    if earlier_attempt is not None:  # the first attempt of this flow run has chosen the earlier run
        run = load_status(home, earlier_attempt).origin["from"]
    base = choose_base(home, stage, run, config)
    notes.insert(0, f"{stage} again from run {base.run}" + (f" ({base.instead})" if base.instead else ""))
    reused = f"; the results of {', '.join(filter(base.config.has, before))} are reused" if before else ""
    if misfits := base.config.runtime.misfits():
        notes.append(
            f"run {base.run} was resolved for another machine ({'; '.join(misfits)}): recomputed stages are resolved "
            f"for this one{reused}"
        )
    if config is None:
        config = _changed(base, stage, overrides)
    if "ppo" in before:  # what its rollouts leave open is what the earlier run's were sampled with
        rollout = config.ppo.rollout.model_copy(update=keyed_values(base.config.ppo.rollout))
        config = config.model_copy(update={"ppo": config.ppo.model_copy(update={"rollout": rollout})})
    check_kl_limits(config, f"run {base.run}", base.config)
    refuse_outside(config, home)
    _check_stages_of("rerun", computed, config)
    if base.config.seed != config.seed and before:
        notes.append(f"seed {config.seed} applies to {stage} and later stages{reused}")
    like = base.run if profile in (None, base.profile) else None
    return _prepare(home, profile or base.profile, config, request, like, base, stage, notes)


def _changed(base: Base, stage: str, overrides: Sequence[Override]) -> RunConfig:
    """Return the config of `base` with `overrides`. Raises UserError if they change what a stage before `stage` depends
    on."""
    values = {**base.values, "runtime": {}} if base.config.runtime.misfits() else base.values
    config = check_config(apply_overrides(values, overrides), source=f"run {base.run}")
    for field, first in changed_before(stage, base.config, config).items():
        raise UserError(
            f"--set {field}: {first} depends on it and comes before {stage}, so this rerun would reuse the {first} of "
            f"run {base.run}. Rerun from there: `tether rerun {first} --from {base.run} --set {field}=...`."
        )
    return config


def _prepare(
    home: Path, profile: str, config: RunConfig, request: Request, like: str | None, base: Base | None = None,
    stage: str = "", notes: Sequence[str] = (),
) -> Launch:  # fmt: skip
    """Settle what `config` leaves open, find the inputs, and begin a run of `config`, or a rerun of `stage`."""
    _check_stages_of("--until", [request.until] if request.until else [], config)
    before = earlier_stages(stage) if base is not None else []
    until, with_ppo = request.until, "ppo" not in before and reaches("ppo", request.until)
    config = settled_gates(config if "validate" in before else settled_readers(config))
    config, choices = _settled(with_guidelines(config).resolved(with_ppo), home)
    if with_ppo:
        config, reward_notes = settled_rewards(config, home)
        choices += reward_notes
    pinned = {} if base is None else base.records
    if "sft" not in pinned and stage != "sft":
        pinned = {**pinned, **kept_sft(config, home)}
    origin = round_of(config)
    if base is not None:
        origin |= {"stage": stage, "from": base.run}
    again = None
    if request.flow_run:
        origin["flow_run"], again = request.flow_run, run_of_flow(home, request.flow_run)
    ends = {"until": until} if until not in (None, PIPELINE[-1]) else {}
    again = again or (base.run if base is not None else None)
    sources = find_sources(config, home, taken=pinned, again=again, until=until)
    if with_ppo and config.policy.method == "kto":
        _check_single_labels(config, sources.data)
    method = {} if config.policy.method == "ppo" else {"method": config.policy.method}
    origin |= ends | method | resolved_reference(config, sources.data)
    always = ("ppo",) if with_ppo and has_unversioned(config) else ()
    computed = [*([stage] if stage else []), *request.refresh, *always]
    ctx = begin_run(home, profile, config, origin, request, like, Reuse(refreshed(computed), pinned))
    cut = cut_sizes(config) if with_ppo else []
    return Launch(ctx, config, sources, [*notes, *choices, *rollout_lines(config, with_ppo), *off_gates(config), *cut])


def _settled(config: RunConfig, home: Path) -> tuple[RunConfig, list[str]]:
    """Return `config` with the base's commit, the template's text and every learning rate, and lines that name them."""
    config, pinned = pinned_base(with_template(config), home)
    config, chosen = with_rates(config, home)
    return config, [*pinned, *chosen]


def round_of(config: RunConfig) -> dict[str, str]:
    """Return the origin of a round of `tether iterate`: its number, and the run whose policy people judged last."""
    votes = config.data.votes
    return {"round": str(len(votes)), "votes": votes[-1]} if votes else {}


def begin_run(
    home: Path, profile: str, config: RunConfig, origin: Mapping[str, str], request: Request, like: str | None,
    reuse: Reuse = NO_PINS,
) -> RunContext:  # fmt: skip
    """Begin a run, or continue the one that the same flow run began before a retry.

    Args:
        profile: a profile's name or file.
        like: an earlier run whose profile this run has.
    """
    check_access(home)
    gates, execution = config.effective_gates, execution_of(config)
    reporting = Reporting(config.project, at_end=write_reports)
    tried = run_of_flow(home, origin["flow_run"]) if "flow_run" in origin else None
    if tried is not None:
        return RunContext.resume(home, tried, gates, request.waivers, request.user, reuse, execution, reporting)
    return RunContext.start(
        home, profile_name(profile), gates, config=to_values(config),
        profile_values=file_values(profile) if like is None else profile_values(home, like),
        waivers=request.waivers, stages=config.pipeline, origin=origin, label=request.label, user=request.user,
        reuse=reuse, execution=execution, reporting=reporting,
    )  # fmt: skip


def _check_end(until: str | None, computed: Sequence[str]) -> None:
    """Raise UserError if there is no stage `until`, or it comes before one that the run is asked to compute."""
    if until is None:
        return
    check_stages("--until", [until], PIPELINE)
    for stage in computed:
        if not reaches(STAGES[stage].group, until):
            raise UserError(
                f"--until {until}: the run would end before {stage}, which it is asked to compute. "
                f"Name {stage} or a later stage."
            )


def execution_of(config: RunConfig) -> Execution:
    """Return how stages are computed under a config: pools, retries, time limits and prices."""
    attempts = Attempts(config.retries, config.retry_seconds)
    return Execution(config.pools, attempts, config.timeouts, config.hourly_prices, config.prices.currency)


def off_gates(config: RunConfig) -> list[str]:
    """Return lines about gates that are off though nobody turned them off: those that the config does not name, those
    on KL without a band, and `ppo.stopped` if nothing can fail it."""
    notes = []
    unnamed, on_kl = config.effective_gates.unnamed, {"policy.kl", "policy.kl_per_token"}
    if on_kl <= {*unnamed}:
        notes.append(
            "no gate judges KL, because ppo.kl.band is null and gates.policy names no gate on KL. Set ppo.kl.band to "
            "about twice ppo.kl.target, or gates.policy.kl=null to leave this line out"
        )
    if off := [name for name in unnamed if name not in on_kl]:
        more = f" and {len(off) - MOST} more" if len(off) > MOST else ""
        gates = f"{counted(len(off), 'gate is', 'gates are')} off because the profile does not name"
        notes.append(f"{gates} {'it' if len(off) == 1 else 'them'}: {', '.join(off[:MOST])}{more}")
    reasons = config.effective_gates.reasons
    if reasons:
        notes.append(f"gates are off because {next(iter(reasons.values()))}: {', '.join(reasons)}")
    limits = {gate.name: threshold for gate, threshold in config.gates.rules("ppo")}
    if limits["ppo.stopped"] is None:
        return notes
    if config.policy.method in DIRECT_METHODS:
        why = ["policy.evaluate_every is null"] if config.policy.evaluate_every is None else []
        kl = config.ppo.kl
        why += ["ppo.kl.ceiling and ppo.kl.band are null"] if kl.ceiling is None and kl.band is None else []
        if why and not config.policy.stop_on_alarm:
            notes.append(
                f"the gate ppo.stopped is off because nothing can fail it: {' and '.join(why)}. A direct method "
                "compares KL with the ceiling and the band at its evaluations. Set what is null, or "
                "gates.ppo.stopped=null to leave this line out"
            )
    elif not config.ppo.can_break:
        notes.append(
            "the gate ppo.stopped is off because nothing can fail it: ppo.kl.ceiling is null, ppo.kl.band is null "
            "(or a batch has a single prompt), and ppo.monitors.stop_on and ppo.observers are empty. Set "
            "ppo.kl.ceiling to twice ppo.kl.target or more, or gates.ppo.stopped=null to leave this line out"
        )
    return notes


def rollout_lines(config: RunConfig, with_ppo: bool) -> list[str]:
    """Return a line about what a server that samples changes, or, for PPO on a GPU, about what it would change."""
    rollout, runner = config.ppo.rollout, config.runners.get("ppo")
    with_ppo = with_ppo and config.policy.method not in DIRECT_METHODS
    runtime = runner.runtime if runner is not None and runner.runtime is not None else config.runtime
    if with_ppo and rollout.by_server:
        again = "the same bytes" if rollout.bit_exact else "other bytes"
        return [
            f"vLLM {rollout.version} ({rollout.dtype}) samples PPO's responses, and computing PPO again gives {again}. "
            "Importance weights (ppo.importance) correct for the server's rounding, and PPO stops if ppo/sampler_drift "
            "says that it is another policy"
        ]
    if with_ppo and runtime.device == "cuda":
        return [
            "PPO samples in the process that trains, so computing it again gives the same bytes. On an H200 it uses at "
            "most 16 % of the memory's bandwidth (docs/benchmarks/gpu.md). A vLLM server is made to use more, which is "
            "not measured yet: set ppo.rollout.engine=auto and TETHER_VLLM_URL"
        ]
    return []


def cut_sizes(config: RunConfig) -> list[str]:
    """Return a line about each number of SFT's answers that is set to more than the reward stage samples."""
    most, ppo = config.reward.scale_responses, config.ppo
    sizes = ("ppo.watch.prompts", ppo.watch, "prompts"), ("ppo.monitors.responses", ppo.monitors, "responses")
    return [
        f"{option} is {size}, but reward.scale_responses is {most}, so only {most} are used. Raise "
        f"reward.scale_responses, or lower {option}"
        for option, group, name in sizes
        if (size := getattr(group, name) or 0) > most and size != type(group).model_fields[name].default
        and is_used(config.policy.method, option)
    ]


def _check_stages_of(what: str, stages: Iterable[str], config: RunConfig) -> None:
    for stage in stages:
        if not config.has(stage):
            options = " or ".join(OPTIONAL[stage])
            raise UserError(
                f"{what} {stage}: a run has this stage only with {options}, and this one does not. Set it, as in --set "
                f"{OPTIONAL[stage][0]}=[FILE]."
            )


def _check_single_labels(config: RunConfig, data: Mapping[str, Input]) -> None:
    """Raise UserError if the demonstrations have labels: the pairs beside them would be the generator's."""
    labels = None if of_kind(data, "preferences") else data.get("demonstrations")
    if labels is None or not labels.path.exists():
        return
    if detected(RowSource.named("demonstrations", labels.path, config.data))[0] == KTO:
        raise UserError(
            f"policy.method=kto: {labels.path} has single labels, and data.preferences names no pairs, from which the "
            "reward model and KTO learn too. Name a file of pairs. If prompts have responses with both labels and the "
            "fields `prompt` and `response`, name the same file with data.score.name=label."
        )


def check_stages(what: str, stages: Iterable[str], names: Sequence[str] = _KNOWN) -> None:
    """Raise UserError if one of `stages` is not in `names` (by default the pipeline's stages and sub-stages)."""
    for stage in stages:
        if stage not in names:
            raise UserError(f"{what} {stage}: no such stage; there are {', '.join(names)}.")
