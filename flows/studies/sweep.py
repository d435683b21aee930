"""A sweep: the runs of every combination of some options' values, each with several seeds of the policy.

Data, SFT and reward model are computed once, because the cells' keys of these stages are the same. Each cell ends after
PPO and gives no model an alias.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from components.base.errors import UserError
from components.base.hashing import digest_json
from components.base.nested import flatten, group
from components.ppo.config import KL_LIMITS, KLConfig
from flows.config import yaml
from flows.config.profiles import apply_overrides, parse_override, profile_name, read_profile
from flows.config.run_config import load_config, to_values
from flows.launch.begin import check_new_run
from flows.launch.label_runs import compare
from flows.launch.request import Request
from flows.launch.run_computing import compute
from flows.reports.run_facts import StageFacts, on_the_sheet
from flows.studies.level_kl import (
    TOLERANCE,
    Band,
    Strength,
    Trial,
    best,
    calibration_kl,
    next_strength,
    outcome,
    strength_of,
)
from flows.studies.sub_runs import ENDED, Study, SubRun
from flows.studies.sweep_outcome import Group, Sweep, cell_of, samples_of
from tasks.execution.stage_progress import say
from tasks.runs.run_label import Label
from tasks.runs.status import RunStatus, load_status

KIND = "sweep"


class SweepRequest(NamedTuple):
    """What is asked of a sweep. `over` and `options` are texts as `--over` and `--set` take them."""

    profile: str
    over: Sequence[str]
    options: Sequence[str] = ()
    seeds: int = 1
    level: bool = False
    """Whether each group's strength is searched so that its KL lands in the band."""
    band: Band | None = None
    """Null: the KL target of the profile ± 20 %."""
    minutes: float | None = None
    """No run begins later than this; None for no limit."""
    sheet: int | None = None
    """Number of items of a blind sheet over all policies; None for no sheet."""
    name: str | None = None


@dataclass
class CellGroup:
    """The options of a group of cells, and its runs so far."""

    request: SweepRequest
    options: Sequence[str]
    strength: Sequence[str] = ()
    """The option that the search chose, as `--set` takes it."""
    trials: list[Trial] = field(default_factory=list)
    search: str = ""
    runs: dict[int, RunStatus] = field(default_factory=dict)
    """By number of the seed, from 0."""

    @property
    def name(self) -> str:
        return ", ".join([*self.options, *self.strength])

    def sub_run(self, number: int, strength: Sequence[str] = ()) -> SubRun:
        """Return the run with the seed `number` places after the profile's. Raises UserError as `load_config`."""
        options = [*self.request.options, *self.options, *(strength or self.strength)]
        options += [*_limits(self.request.profile, options), "promote=false"]
        name, profile = ", ".join([*self.options, *(strength or self.strength)]), self.request.profile
        try:
            config = load_config(profile, map(parse_override, options))
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        seed = config.seed + number
        if number:  # null for the first seed: the plain run of the profile has the same policy
            config = config.model_copy(update={"policy_seed": seed})
        return SubRun(f"{name}, seed {seed}", config)


def sweep(home: Path, request: SweepRequest) -> Sweep:
    """Compute the sweep, or what is missing of it, and return its outcome. All configs are checked before.

    Seeds are the outer loop, so that a budget that ends early leaves the same number of seeds to each group.

    Raises:
        UserError: an option is wrong, two cells are the same, or another process computes this sweep. Errors of a
            stage, but for failed gates and checks, are passed on unchanged.
    """
    settings = [CellGroup(request, options) for options in combinations(request.over)]
    strengths = _checked(home, settings, request)
    about = [*request[:3], request.level, request.band]
    name = request.name or re.sub(r"[^\w.-]", "-", f"{profile_name(request.profile)}-{digest_json(about)[:6]}")
    if not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UserError(f"--name {name}: use letters, digits and _ . - only, and begin with a letter or digit.")
    with Study.open(home, KIND, name, request.profile, request.minutes) as study:
        cells = f"{len(settings)} x {request.seeds} cells"
        say(study.console, f"sweep {name}: {cells}, page in {study.folder}")
        for number in range(request.seeds):
            for setting, strength in zip(settings, strengths, strict=True):
                if number == 0 and request.level:
                    _search(study, setting, strength, band_of(request))
                elif (request.level and not setting.trials) or (status := study.run(setting.sub_run(number))) is None:
                    continue
                else:
                    setting.runs[number] = status
        sheet = _sheet(study, settings, request.sheet) if request.sheet else None
        return _outcome(study, settings, request, sheet)


def combinations(over: Sequence[str]) -> Iterator[list[str]]:
    """Yield every combination of the values of `--over OPTION=V1,V2`, as texts for `--set`.

    Raises:
        UserError: an option, the equals sign or the values are missing, or an option is given twice.
    """
    by_option: dict[str, list[str]] = {}
    for text in over:
        option, _, values = (part.strip() for part in text.partition("="))
        if not option or not values:
            raise UserError(f"--over {text}: expected OPTION=V1,V2, as in --over ppo.kl.target=1,2,4.")
        if option in by_option:
            raise UserError(f"--over {text}: {option} is given twice. Name all its values at once.")
        parsed = yaml.parse(f"[{values}]", f"--over {text}")
        by_option[option] = [f"{option}={_text(value)}" for value in parsed]
    return map(list, product(*by_option.values()))


def _text(value: Any) -> str:
    """Return a value as `--set` reads it."""
    plain = isinstance(value, str) and bool(value) and yaml.parse(value, "") == value
    return value if plain else json.dumps(value)


def band_of(request: SweepRequest) -> Band:
    """Return the band of KL: the one asked for, or the profile's target ± 20 %."""
    target = _kl_options(request.profile, request.options).get("target", KLConfig().target)
    return request.band or Band((1 - TOLERANCE) * target, (1 + TOLERANCE) * target)


def _kl_options(profile: str, options: Sequence[str]) -> Mapping[str, Any]:
    return group(apply_overrides(read_profile(profile), map(parse_override, options)), "ppo", "kl")


def _limits(profile: str, options: Sequence[str]) -> list[str]:
    """Return band and ceiling in proportion to the target, if `options` change the target but no limit.

    A target of 8 with the profile's band of 6.5 would be refused, and one of 1 would have no limit to speak of.
    """
    named = {option.partition("=")[0] for option in options}
    plain, changed = _kl_options(profile, ()), _kl_options(profile, options)
    target, before = changed.get("target"), plain.get("target", KLConfig().target)
    if not isinstance(target, int | float) or target == before or plain.get("unit") != changed.get("unit"):
        return []
    limits = {name: plain[name] for name in KL_LIMITS if plain.get(name) is not None and f"ppo.kl.{name}" not in named}
    return [f"ppo.kl.{name}={limit * target / before:g}" for name, limit in limits.items()]


def _checked(home: Path, settings: Sequence[CellGroup], request: SweepRequest) -> list[Strength]:
    """Check every cell's config, and return the option of each group's strength. Raises UserError for the first
    mistake."""
    names: dict[str, str] = {}
    strengths = []
    for setting in settings:
        first = setting.sub_run(0)
        try:
            check_new_run(home, request.profile, first.config, first.until)
        except UserError as error:
            raise UserError(f"{setting.name}: {error}") from error
        strengths.append(strength := strength_of(first.config))
        chosen = {option.partition("=")[0] for option in (*setting.options, *request.options)}
        if request.level and strength.option in chosen:
            raise UserError(f"--level-kl chooses {strength.option}, which is set too: leave one of them out.")
        if request.level and first.config.ppo.evaluate_every is None:
            raise UserError("--level-kl needs the evaluations of ppo.evaluate_every, which is null: set it.")
        for cell in (setting.sub_run(number) for number in range(request.seeds)):
            if cell.key in names:
                raise UserError(f"{cell.name}: the same options as {names[cell.key]}. Leave one of them out.")
            names[cell.key] = cell.name
    return strengths


def _search(study: Study, setting: CellGroup, strength: Strength, band: Band) -> None:
    """Choose the strength of a group on its first seed, by runs of the full length: a shorter run has less KL, and the
    run with the chosen strength is the group's first cell."""
    config = setting.sub_run(0).config
    is_target = strength.option == "ppo.kl.target"
    start = band.middle if is_target else flatten(to_values(config))[strength.option]
    value: float | None = float(f"{start:.3g}")
    statuses: dict[float, RunStatus] = {}
    while value is not None:
        try:
            status = study.run(setting.sub_run(0, [f"{strength.option}={value:g}"]))
        except UserError as error:
            if not setting.trials:
                raise
            setting.search = f"the search ended at {error}"
            break
        if status is None:
            setting.search = "the budget ended the search"
            break
        policy = StageFacts.of(study.home, status.run, status.stage("ppo"))
        if (kl := calibration_kl(policy, config.ppo.kl.measure)) is None:
            setting.runs[0], setting.search = status, "no search: the run has no KL on calibration prompts"
            return
        statuses[value] = status
        setting.trials.append(Trial(value, kl, status.run, policy.record.seconds if policy.record else 0.0))
        value = next_strength(setting.trials, band, strength)
    if setting.trials:
        chosen = best(setting.trials, band)
        setting.strength, setting.runs[0] = [f"{strength.option}={chosen.strength:g}"], statuses[chosen.strength]
        cut = f"; {setting.search}" if setting.search else ""
        setting.search = outcome(setting.trials, band) + cut
        say(study.console, f"{setting.name}: {setting.search}")


def _sheet(study: Study, settings: Sequence[CellGroup], items: int) -> RunStatus | None:
    """Return the run that compares the policies of the groups' first seeds, and SFT, on a blind sheet; it is begun if
    there is none. None if there are fewer than two policies."""
    policies: dict[str, str] = {}
    for status in (setting.runs[0] for setting in settings if 0 in setting.runs):
        if digest := status.stage("ppo").digest:
            policies.setdefault(digest, status.run)
    runs = list(policies.values())
    if len(runs) < 2:
        say(study.console, f"--sheet {items}: there are fewer than two different policies to compare")
        return None
    key = digest_json([runs, items])[:16]
    if (sheet := study.newest(key, (*ENDED, "awaiting_labels"))) is not None:
        return sheet
    overrides = [parse_override(f"human_eval.items={items}")]
    request = Request(label=Label(f"sheet of {study.name}"[:100], study.tags(key)))
    launch = compare(study.home, [f"{runs[0]}:sft", *runs], runs[0], overrides, request)
    compute(launch)
    return load_status(study.home, launch.ctx.run)


def _outcome(study: Study, settings: Sequence[CellGroup], request: SweepRequest, sheet: RunStatus | None) -> Sweep:
    groups, seconds = [], dict[str, float]()
    for setting in settings:
        config = setting.sub_run(0).config
        cells = [cell_of(study.home, config.seed + number, status, config) for number, status in setting.runs.items()]
        missing = [config.seed + number for number in range(request.seeds) if number not in setting.runs]
        options = [*setting.options, *setting.strength]
        options += _limits(request.profile, [*request.options, *options])
        groups.append(Group(setting.name, options, cells, missing, setting.trials, setting.search))
        seconds |= {cell.run: cell.measures["seconds"].value for cell in cells if "seconds" in cell.measures}
        seconds |= {trial.run: trial.seconds for trial in setting.trials}
    hidden = on_the_sheet(StageFacts.of(study.home, sheet.run, sheet.stage("human_eval"))) if sheet else ()
    first_runs = {setting.name: setting.runs[0] for setting in settings if 0 in setting.runs}
    samples = samples_of(study.home, first_runs, hidden)
    return Sweep(
        study.name, request.profile, request.options, groups, sum(seconds.values()), samples, sheet.run if sheet else ""
    )
