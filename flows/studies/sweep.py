"""A sweep: the runs of every combination of some options' values, each with several seeds of the policy.

Data, SFT and reward model are computed once, because these stages have the same keys in all cells that do not change
them. A cell is a run that ends after PPO and gives no model an alias.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median

from components.base.errors import GateFailed, UserError
from components.base.hashing import canonical_json, digest_json
from components.base.jsonl import read_rows
from components.gates.methods import is_used
from components.ppo.config import KLConfig
from components.store.store import ArtifactStore
from flows.base_run import changed_before
from flows.config import yaml
from flows.config.profiles import parse_override, profile_name
from flows.config.run_config import RunConfig, load_config
from flows.launch.label_runs import compare
from flows.launch.request import Request
from flows.launch.run_computing import compute
from flows.reports.run_facts import Document, StageFacts, on_the_sheet
from flows.studies.level_kl import Band, Search, Trial, calibration_kl
from flows.studies.sub_runs import ENDED, Study
from tasks.execution.stage_progress import output, say
from tasks.runs.status import RunStatus, load_status

MEASURES = {
    "policy/kl": "KL to SFT, nats a response",
    "policy/kl_per_token": "KL to SFT, nats a token",
    "policy/gold_gain": "gold gain (simulated)",
    "policy/judge_gain": "judge's gain, SFT deviations",
    "policy/reward_gain": "reward gain, SFT deviations",
    "policy/distinct_ratio": "distinct 4-grams, relative to SFT",
    "policy/repetition": "repetition",
    "policy/response_tokens": "response, tokens",
    "seconds": "training, s",
    "memory": "peak memory, GB",
}
"""Maps what is compared to its heading. A name with `_low` or `_high` is an end of its interval."""
PROMPTS = 8
"""Number of prompts whose responses are shown side by side."""


@dataclass
class Cell:
    """A run that has ended. `measures` has those of `MEASURES` with their intervals over prompts."""

    seed: int
    run: str
    state: str
    failed_gates: list[str]
    measures: dict[str, float]
    models: dict[str, str] = field(default_factory=dict)
    """Digests of its models by stage, as far as it has them."""
    calibration_kl: float | None = None
    """As the function of that name returns it."""

    @classmethod
    def of(cls, home: Path, seed: int, status: RunStatus, kl: KLConfig) -> "Cell":
        """Return the cell whose run has ended with `status`. Of the measures of KL it has the one in `kl.unit`."""
        policy = StageFacts.of(home, status.run, status.stage("ppo"))
        seconds = policy.record.seconds if policy.record else None
        all_values = {**policy.metrics, "seconds": seconds, "memory": policy.speed["memory"]}
        values = {name: value for name, value in all_values.items() if value is not None}
        if {"policy/gold", "policy/sft_gold"} <= values.keys():
            values["policy/gold_gain"] = values["policy/gold"] - values["policy/sft_gold"]
        compared = MEASURES.keys() - ({"policy/kl", "policy/kl_per_token"} - {f"policy/{kl.measure}"})
        measures = {name: value for name, value in values.items() if re.sub("_(low|high)$", "", name) in compared}
        failed = [gate.name for stage in status.stages for gate in stage.gates if gate.stops]
        models = {stage.name: stage.digest for stage in status.stages if stage.digest and stage.name != "validate"}
        return cls(seed, status.run, status.state, failed, measures, models, calibration_kl(policy, kl))


@dataclass
class CellGroup:
    """The cells that differ by their seed only. `options` are texts as `--set` takes them."""

    options: list[str]
    """With `--level-kl` the last is the strength that the search chose."""
    cells: list[Cell] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    search: str = ""
    """How the search for the strength ended, or why the group has no run; empty without one."""

    @property
    def name(self) -> str:
        return ", ".join(self.options)

    @property
    def over_seeds(self) -> dict[str, float]:
        """Return the median of each measure over the seeds; its interval is from the lowest to the highest."""
        summary = dict[str, float]()
        for name in MEASURES:
            if values := [cell.measures[name] for cell in self.cells if name in cell.measures]:
                ends = {f"{name}_low": min(values), f"{name}_high": max(values)} if len(values) > 1 else {}
                summary |= {name: median(values), **ends}
        return summary


@dataclass
class Sweep:
    """What a sweep is asked for, `over` and `options` as `--over` and `--set` take them, and its outcome."""

    profile: str
    over: Sequence[str]
    options: Sequence[str] = ()
    seeds: int = 1
    level: bool = False
    """Whether each group's strength is searched."""
    band: Band | None = None
    """The KL that the search aims at; None as in `Search.of`."""
    groups: list[CellGroup] = field(default_factory=list)
    samples: list[Document] = field(default_factory=list)
    """By prompt: `prompt`, and `responses` of SFT, if all groups have the same, and of each group's first seed, by
    name."""
    sheet: str = ""
    """The run that compares the policies on a blind sheet: the one asked for, or one that raters judge now; empty
    without one."""

    @property
    def name(self) -> str:
        """Return its name, which follows from its options, so that the same command continues it."""
        about = digest_json([self.profile, list(self.over), list(self.options), self.level, self.band])
        return re.sub(r"[^\w.-]", "-", f"{profile_name(self.profile)}-{about[:6]}")

    def models(self, stage: str) -> set[str]:
        """Return the digests of the cells' models of a stage."""
        return {cell.models[stage] for group in self.groups for cell in group.cells if stage in cell.models}

    def config(self, options: Sequence[str], seed: int = 0) -> RunConfig:
        """Return the config of the run with these options whose policy has this seed. A `--set` that its method does
        not use is left out, if another cell's method uses it. Raises UserError as `load_config`."""
        common = (text for text in self.options if self._is_for(options, text))
        overrides = [parse_override(text) for text in (*common, *options, "promote=false")]
        config = load_config(self.profile, overrides)
        if all(override.path != ("policy_seed",) for override in overrides):
            # With the profile's seed the policy is that of a plain run.
            return config.model_copy(update={"policy_seed": None if seed == config.seed else seed})
        if self.seeds > 1:
            raise UserError("--seeds chooses policy_seed, which is set too. Leave one of them out.")
        return config

    def _is_for(self, options: Sequence[str], text: str) -> bool:
        """Return whether one of `--set` is for the cells with these options: their method uses it, or none does."""
        option, method = ".".join(parse_override(text).path), "policy.method="
        swept = {chosen for cell in combinations(self.over) for chosen in cell if chosen.startswith(method)}
        users = {chosen for chosen in swept if is_used(chosen.removeprefix(method), option)}
        return not users or not users.isdisjoint(options)

    def search(self, options: Sequence[str]) -> Search:
        """Return the search for the strength of the group with these options. Raises UserError if it is ruled out."""
        search = Search.of(self.config(options), self.band)
        if search.option in {text.partition("=")[0] for text in (*options, *self.options)}:
            raise UserError(f"--level-kl chooses {search.option}, which is set too. Leave one of them out.")
        return search


def run_sweep(home: Path, sweep: Sweep, minutes: float | None = None, sheet: int | None = None) -> Path:
    """Compute a sweep, or what is missing of it, fill in its outcome, and return its folder.

    All configs are checked before the first run. Seeds are the outer loop, so that a budget that ends early leaves
    every group about as many.

    Args:
        minutes: no run begins later than this.
        sheet: number of items of a blind sheet that compares the policies.

    Raises:
        UserError: an option is wrong, two cells are the same, a sheet is asked for where SFT's models differ, or
            another process computes this sweep. Errors of a stage, but for failed gates and checks, are passed on
            unchanged.
    """
    sweep.groups = [CellGroup(options) for options in combinations(sweep.over)]
    study = Study(home, "sweep", sweep.name, sweep.profile, minutes)
    _check(study, sweep, bool(sheet))
    with study.held():
        for seed, group in product(range(sweep.seeds), sweep.groups):
            if sweep.level and seed == 0:
                _search(study, sweep, group)
            elif (group.trials or not sweep.level) and (cell := _cell(study, sweep, group.options, seed)):
                group.cells.append(cell)
        first = {group.name: cell for group in sweep.groups for cell in group.cells[:1] if "ppo" in cell.models}
        policies = {cell.models["ppo"]: cell.run for cell in first.values()}
        comparable = len(policies) > 1 and len(sweep.models("sft")) == 1
        compared = _sheet(study, [*policies.values()], sheet) if sheet and comparable else None
        waiting = [*study.runs({}, ("awaiting_labels",))]  # also of a call before
        sweep.sheet = next((run.run for run in (compared, *waiting) if run), "")
        sweep.samples = _samples(home, sweep, first, waiting)
    return study.folder


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
        plain = (value if isinstance(value, str) and yaml.parse(value, "") == value else json.dumps(value)
                 for value in parsed)  # fmt: skip
        by_option[option] = [f"{option}={value}" for value in plain]
    return map(list, product(*by_option.values()))


def _check(study: Study, sweep: Sweep, sheet: bool) -> None:
    """Begin every cell of the first seed and discard it, so that the first mistake in any of them is raised before the
    first run: a UserError."""
    first = dict[str, RunConfig]()
    for group in sweep.groups:
        try:
            search = sweep.search(group.options) if sweep.level else None
            config = sweep.config([*group.options, *([search.setting(search.start)] if search else [])])
            study.begin(group.name, config).ctx.discard()
        except UserError as error:
            raise UserError(f"--over {group.name}: {error}") from error
        for name, other in first.items():
            if other == config:
                raise UserError(f"--over {group.name}: the options are those of {name}. Leave one out.")
            if sheet and (option := _changes_sft(other, config)):
                raise UserError(
                    f"--sheet compares the policies with one SFT model, and --over {option} gives the cells several. "
                    "Leave one of them out."
                )
        first[group.name] = config


def _changes_sft(one: RunConfig, other: RunConfig) -> str | None:
    """Return an option that differs and that SFT's model depends on; None if there is none."""
    if one.sft.keep is not None and one.sft.keep == other.sft.keep:
        return None
    changed = {"seed": "sft"} if one.seed != other.seed else changed_before("reward", one, other)
    return next((option for option, stage in changed.items() if stage != "validate.judge"), None)


def _cell(study: Study, sweep: Sweep, options: Sequence[str], seed: int = 0) -> Cell | None:
    """Return the cell with these options and this seed, computed if it has not ended; None if the budget is spent."""
    config = sweep.config(options, seed)
    status = study.run(study.begin(f"{', '.join(options)}, seed {seed}", config))
    return None if status is None else Cell.of(study.home, seed, status, config.ppo.kl)


def _search(study: Study, sweep: Sweep, group: CellGroup) -> None:
    """Choose a group's strength on its first seed, and add the run with it as the group's first cell."""
    search, tried, end = sweep.search(group.options), list[Cell](), ""
    group.trials = search.trials
    while (value := search.next()) is not None:
        option = search.setting(value)
        try:
            if (cell := _cell(study, sweep, [*group.options, option])) is None:
                end = "the budget ended it"
                break
            tried.append(cell)
            if cell.calibration_kl is None:
                raise UserError(f"{option} has no KL on calibration prompts")
        except UserError as error:
            if not tried and len(sweep.groups) == 1:
                raise
            end = f"it ended there, because {error}"
            group.search = f"no search, because {error}{'; other seeds are not computed' if tried else ''}"
            break
        search.trials.append(Trial(value, cell.calibration_kl, cell.run, cell.measures.get("seconds", 0.0)))
    if group.trials:
        group.options = [*group.options, search.setting(search.best().strength)]
        group.search = "; ".join(filter(None, (search.sentence(), end)))
        say(output(), f"{group.name}: {group.search}")
    group.cells += [cell for cell in tried if not search.trials or cell.run == search.best().run]


def _sheet(study: Study, runs: Sequence[str], items: int) -> RunStatus:
    """Return the run that compares the policies of `runs` with SFT, blind; it is begun if there is none."""
    label = study.label(f"sheet of sweep {study.name}", [*runs, items])
    if (sheet := next(study.runs(label.tags, (*ENDED, "awaiting_labels")), None)) is not None:
        return sheet
    models, overrides = [f"{runs[0]}:sft", *runs], [parse_override(f"human_eval.items={items}")]
    launch = compare(study.home, models, runs[0], overrides, Request(label=label))
    with suppress(GateFailed):  # a gate on the raters
        compute(launch, study.server)
    return load_status(study.home, launch.ctx.run)


def _samples(
    home: Path, sweep: Sweep, cells: Mapping[str, Cell], sheets: Sequence[RunStatus]
) -> list[Document]:
    """Return the responses of cells, by name, to the same prompts, without those that raters judge now, on `sheets`."""
    by_name = {}
    for name, cell in cells.items():
        rows = read_rows(ArtifactStore(home).path(cell.models["ppo"]) / "evaluation.jsonl")
        by_name[name] = {canonical_json(row["prompt"]): row for row in rows}
    on_sheets = (on_the_sheet(StageFacts.of(home, sheet.run, sheet.stage("human_eval"))) for sheet in sheets)
    hidden = {prompt for sheet in on_sheets for prompt in sheet}
    first = next(iter(by_name.values()), {})
    prompts = [prompt for prompt in first if prompt not in hidden and all(prompt in rows for rows in by_name.values())]
    samples = list[Document]()
    for prompt in prompts[:PROMPTS]:
        sft = {"SFT": first[prompt]["sft"]} if len(sweep.models("sft")) == 1 else {}
        policies = {name: rows[prompt]["policy"] for name, rows in by_name.items()}
        samples.append({"prompt": first[prompt]["prompt"], "responses": sft | policies})
    return samples
