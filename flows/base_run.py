"""What a rerun continues from: an earlier run whose artifacts are in the store, and its config."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.data.inputs import JUDGE, NAMED
from components.keys.changes import changes
from components.rewards.config import FunctionReward, ModelReward
from components.store.store import ArtifactStore, Miss, Record
from flows.config.run_config import RunConfig, check_config
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, list_runs, load_status, own_runs
from tasks.stages import PIPELINE, STAGES

SOURCES = (*(f"data.{name}" for name in NAMED), "data.hub", "data.votes", "sft.base", "sft.keep")
"""Config fields that name external inputs. They enter keys by content, so a job's keyed values lack them."""


_MOST = 3  # runs named that would not do


class Base(NamedTuple):
    """An earlier run to continue from."""

    run: str
    profile: str
    values: dict[str, JsonValue]
    """Its resolved config as it was kept."""
    config: RunConfig
    records: dict[str, Record]
    """What it has for the stages that are not computed again, by (sub-)stage."""
    instead: str = ""
    """Which newer runs would not do, and why."""


def choose_base(home: Path, stage: str, run: str | None = None, config: RunConfig | None = None) -> Base:
    """Return the run `run`, or the newest one, whose artifacts of all stages before `stage` are in the store.

    Args:
        home: the `TETHER_HOME`.
        stage: the first one that is computed again.
        run: the only one that will do; an imported run is never chosen unless it is named here.
        config: if given, a run's config must agree with it on all that comes before `stage`.

    Raises:
        UserError: there is none; the message says what each one lacks.
    """
    store = ArtifactStore(home)
    before = earlier_stages(stage)
    runs = [run] if run is not None else list_runs(home)
    if not runs:
        load_status(home)  # says how to start one
    if run is None and not own_runs(home):
        raise UserError(f"rerun {stage}: every run here was imported. Name the one that you trust with --from RUN.")
    unfit: dict[str, str] = {}
    for name in [run] if run is not None else own_runs(home):  # an imported run has to be named
        status = load_status(home, name)
        try:
            values = run_values(home, name)
            own = check_config(values, source="its config")
        except UserError as error:  # damaged, or of an older version
            unfit[name] = str(error)
            continue
        if differing := {} if config is None else changed_before(stage, own, config):
            unfit[name] = f"another {', '.join(differing)}"
            continue
        records, lacking = standing(store, status, before)
        if lacking is None:
            instead = "; ".join(f"not {newer}: {why}" for newer, why in list(unfit.items())[:_MOST])
            return Base(name, status.profile, values, own, records, instead)
        unfit[name] = lacking
    reasons = "; ".join(f"{name}: {why}" for name, why in list(unfit.items())[:_MOST])
    raise UserError(
        f"rerun {stage}: {'the run has not' if run else 'no run here has'} all that comes before it in the store "
        f"({reasons}). Rerun an earlier stage, or start with `tether run`."
    )


def standing(store: ArtifactStore, status: RunStatus, stages: Sequence[str]) -> tuple[dict[str, Record], str | None]:
    """Return the records that a run used for `stages`, by sub-stage, and what is missing for the first without one."""
    found: dict[str, Record] = {}
    lacking: str | None = None
    for stage in (stage for stage in status.stages if stage.name in stages):
        record = _record(store, stage.key, stage.digest, stage.state)
        if isinstance(record, Record):
            found[record.stage] = record
            parts = (_record(store, part.key, part.digest, stage.state) for part in stage.parts.values())
            found |= {part.stage: part for part in parts if isinstance(part, Record)}
        else:
            lacking = lacking or f"{stage.name}: {record.reason}"
    return found, lacking


def _record(store: ArtifactStore, key: str | None, digest: str | None, state: str) -> Record | Miss:
    """Return what a run took for a (sub-)stage: that artifact, not what its key may have been computed to since."""
    if not key or not digest:
        return Miss(f"it has no artifact ({state})")
    return store.lookup(key, digest)


def changed_before(stage: str, one: RunConfig, other: RunConfig) -> dict[str, str]:
    """Config fields that differ and that a stage before `stage` depends on, each with the first such stage.

    Not among them: the machine, and the seed, which may well be another one from `stage` on; a source that `stage`
    reads itself is compared by content when it is found.
    """
    found: dict[str, str] = {}
    before = earlier_stages(stage)
    for each in STAGES.values():
        if each.shown not in before:
            continue
        before_it, now = (keyed_values(config.stage_job(each)) for config in (one, other))
        for change in changes({"job": before_it}, {"job": now}):
            if change.part == "config" and change.name != "seed":
                found.setdefault(change.name, each.shown)
    for field in SOURCES if before else ():
        group, _, name = field.partition(".")
        read_again = field == "sft.base" and stage == "sft"
        was, now = (getattr(getattr(config, group), name) for config in (one, other))
        in_any_order = isinstance(was, tuple) and isinstance(now, tuple) and sorted(was) == sorted(now)
        if not read_again and was != now and not in_any_order:
            found.setdefault(field, "validate.judge" if name == JUDGE else "validate")
    if "reward" in before:
        suites, suites_now = (
            {f"reward.suites.{name}": os.path.abspath(file) for name, file in each.reward.suites.items()}
            for each in (one, other)
        )
        changed = [name for name in suites | suites_now if suites.get(name) != suites_now.get(name)]
        found |= dict.fromkeys(changed, "reward")
    if "ppo" in before:
        files, files_now = _reward_files(one), _reward_files(other)
        changed = [name for name in files | files_now if files.get(name, []) != files_now.get(name, [])]
        found |= dict.fromkeys(changed, "ppo")
    return found


def _reward_files(config: RunConfig) -> dict[str, list[str]]:
    """Files, folders and models of `ppo.rewards` and `ppo.rules`, by option; a job's keyed values lack them."""
    found: dict[str, list[str]] = {"ppo.rewards": []}
    for each in config.ppo.rewards or ():
        if isinstance(each, ModelReward):
            path = each.source.removeprefix("model:")
            found["ppo.rewards"].append(os.path.abspath(path) if Path(path).is_dir() else path)
        elif isinstance(each, FunctionReward):
            found["ppo.rewards"].append(os.path.abspath(each.root))
    if (rules := config.ppo.rules) is not None:
        found["ppo.rules.file"] = [] if rules.file is None else [os.path.abspath(rules.file)]
        found["ppo.rules.root"] = [] if rules.function is None else [os.path.abspath(rules.root)]
    return found


def earlier_stages(stage: str) -> list[str]:
    """Return what the pipeline computes before `stage`, which may be a sub-stage."""
    names: list[str] = list(PIPELINE)
    return names[: names.index(STAGES[stage].shown)]
