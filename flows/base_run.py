"""Find the earlier run that a rerun continues: its config, and its artifacts in the store."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.data.inputs import JUDGE, NAMED, values_of
from components.keys.changes import changes
from components.rewards.config import FunctionReward, ModelReward
from components.store.store import ArtifactStore, Miss, Record
from flows.config.removed import without_removed
from flows.config.run_config import RunConfig, check_config
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, list_runs, load_status
from tasks.stages import PIPELINE, STAGES, group_of

SOURCES = (*(f"data.{name}" for name in NAMED), "data.hub", "data.votes", "sft.base", "sft.keep")
"""Config fields that name external inputs. Keys contain these inputs by content, not by name, so the keyed values of a
job leave the fields out."""


_MOST = 3  # number of unsuitable runs that a message names


class Base(NamedTuple):
    """An earlier run to continue."""

    run: str
    profile: str
    values: dict[str, JsonValue]
    """Its resolved config as stored with the run, without removed options of the stages that are not recomputed."""
    config: RunConfig
    records: dict[str, Record]
    """Its records of the stages that are not recomputed, by (sub-)stage."""
    instead: str = ""
    """Which newer runs are unsuitable, and why."""


def choose_base(home: Path, stage: str, run: str | None = None, config: RunConfig | None = None) -> Base:
    """Return the run `run`, or the newest one, that has the artifacts of all stages before `stage` in the store.

    Args:
        home: the Tether home.
        stage: the first stage to recompute.
        run: the only run to consider.
        config: if given, the run's config must agree with it in everything that the stages before `stage` depend on.

    Raises:
        UserError: no run is suitable; the message says what each one lacks.
    """
    store = ArtifactStore(home)
    before = earlier_stages(stage)
    runs = [run] if run is not None else list_runs(home)
    if not runs:
        load_status(home)  # raises the error that explains how to start one
    unfit: dict[str, str] = {}
    for name in runs:
        status = load_status(home, name)
        try:
            values = without_removed(run_values(home, name), "its config", before)
            run_config = check_config(values, source="its config")
        except UserError as error:  # damaged, or written by an older version
            unfit[name] = str(error)
            continue
        if differing := {} if config is None else changed_before(stage, run_config, config):
            unfit[name] = f"it has a different {', '.join(differing)}"
            continue
        records, lacking = standing(store, status, before)
        if lacking is None:
            instead = "; ".join(f"not {newer}: {why}" for newer, why in list(unfit.items())[:_MOST])
            return Base(name, status.profile, values, run_config, records, instead)
        unfit[name] = lacking
    reasons = "; ".join(f"{name}: {why}" for name, why in list(unfit.items())[:_MOST])
    raise UserError(
        f"rerun {stage}: {'this run does not have' if run else 'no run here has'} the results of all earlier stages in "
        f"the store ({reasons}). Rerun an earlier stage, or start with `tether run`."
    )


def standing(store: ArtifactStore, status: RunStatus, stages: Sequence[str]) -> tuple[dict[str, Record], str | None]:
    """Return the records that a run used for `stages`, by sub-stage, and what is missing for the first without one."""
    records: dict[str, Record] = {}
    lacking: str | None = None
    for stage in (stage for stage in status.stages if stage.name in stages):
        record = _record(store, stage.key, stage.digest, stage.state)
        if isinstance(record, Record):
            records[record.stage] = record
            parts = (_record(store, part.key, part.digest, stage.state) for part in stage.parts.values())
            records |= {part.stage: part for part in parts if isinstance(part, Record)}
        else:
            lacking = lacking or f"{stage.name}: {record.reason}"
    return records, lacking


def _record(store: ArtifactStore, key: str | None, digest: str | None, state: str) -> Record | Miss:
    """Return the record of the artifact that a run used for a (sub-)stage, even if its key has a newer artifact."""
    if not key or not digest:
        return Miss(f"it has no artifact ({state})")
    return store.lookup(key, digest)


def changed_before(stage: str, one: RunConfig, other: RunConfig) -> dict[str, str]:
    """Return the config fields that differ and on which a stage before `stage` depends, each with the first such stage.

    It leaves out the machine and the seed, which may change from `stage` on, and what `other` leaves open of
    `ppo.rollout`, such as an engine `auto`. If `stage` itself reads a source, the source is compared by content later,
    when it is read.
    """
    changed: dict[str, str] = {}
    before = earlier_stages(stage)
    for earlier in (earlier for earlier in STAGES.values() if earlier.group in before):
        was, now = (keyed_values(config.stage_job(earlier)) for config in (one, other))
        for change in changes({"job": was}, {"job": now}):
            group, _, name = change.name.rpartition(".")
            not_asked = group == "ppo.rollout" and getattr(other.ppo.rollout, name) in ("auto", None)
            if change.part == "config" and change.name != "seed" and not not_asked:
                changed.setdefault(change.name, earlier.group)
    sources, sources_now = _sources(one), _sources(other)
    for field, (first, _) in (sources | sources_now).items():
        read_again = field == "sft.base" and stage == "sft"
        if group_of(first) in before and not read_again and sources.get(field) != sources_now.get(field):
            changed.setdefault(field, first)
    return changed


def _sources(config: RunConfig) -> dict[str, tuple[str, object]]:
    """Return the external inputs that a config names, by option: the first stage that depends on each, and its value.

    The order of several files is left out, because it changes no result.
    """
    sources: dict[str, tuple[str, object]] = {}
    for field in SOURCES:
        group, _, name = field.partition(".")
        value = getattr(getattr(config, group), name)
        first = "validate.judge" if name == JUDGE else "validate"
        sources[field] = first, sorted(value) if isinstance(value, tuple) else value
    for name, file in config.reward.suites.items():
        sources[f"reward.suites.{name}"] = "reward", os.path.abspath(file)
    for name in ("tasks", "probes", "judge"):
        named = values_of(getattr(config.evaluation, name))
        sources[f"evaluation.{name}"] = "evaluation", [os.path.abspath(n) if Path(n).exists() else n for n in named]
    rewards: list[str] = []
    for reward in config.ppo.rewards or ():
        if isinstance(reward, ModelReward):
            path = reward.source.removeprefix("model:")
            rewards.append(os.path.abspath(path) if Path(path).is_dir() else path)
        elif isinstance(reward, FunctionReward):
            rewards.append(os.path.abspath(reward.root))
    sources["ppo.rewards"] = "ppo", rewards
    if (rules := config.ppo.rules) is not None and rules.file is not None:
        sources["ppo.rules.file"] = "ppo", os.path.abspath(rules.file)
    if rules is not None and rules.function is not None:
        sources["ppo.rules.root"] = "ppo", os.path.abspath(rules.root)
    return sources


def earlier_stages(stage: str) -> list[str]:
    """Return the stages that the pipeline computes before `stage`, which may be a sub-stage."""
    names: list[str] = list(PIPELINE)
    return names[: names.index(STAGES[stage].group)]
