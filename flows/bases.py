"""What a rerun goes on from: an earlier run whose artifacts stand in the store, and its config."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from components.artifacts import ArtifactStore, Miss, Record
from components.errors import UserError
from components.key_changes import changes
from components.settings import keyed_values
from flows.config import RunConfig, check_config
from tasks.stages import PIPELINE, STAGES
from tasks.status import list_runs, load_status

SOURCES = ("data.preferences", "data.demonstrations", "data.prompts", "data.hub", "sft.base")
"""Config fields that name what no stage made. They enter keys by content, so a job's keyed values lack them."""


_MOST = 3  # runs named that would not do


class Base(NamedTuple):
    """An earlier run to go on from."""

    run: str
    profile: str
    values: dict[str, Any]
    """Its resolved config as it was kept."""
    config: RunConfig
    records: dict[str, Record]
    """What it has for the stages that are not computed again, by (sub-)stage."""
    instead: str = ""
    """Which newer runs would not do, and why."""


def choose_base(home: Path, stage: str, run: str | None = None, config: RunConfig | None = None) -> Base:
    """The run `run`, or the newest one, whose artifacts of all that comes before `stage` stand in the store.

    Args:
        home: the `TETHER_HOME`.
        stage: the first one that is computed again.
        run: the only one that will do.
        config: if given, a run's config must agree with it on all that comes before `stage`.

    Raises:
        UserError: there is none; the message says what each one lacks.
    """
    store = ArtifactStore(home)
    before = earlier_stages(stage)
    if run is None and not list_runs(home):
        load_status(home)  # says how to start one
    unfit: dict[str, str] = {}
    for name in [run] if run is not None else list_runs(home):
        status = load_status(home, name)
        values = run_values(home, name)
        try:
            own = check_config(values, source="its config")
        except UserError as error:  # of an older version
            unfit[name] = str(error)
            continue
        if differing := {} if config is None else changed_before(stage, own, config):
            unfit[name] = f"another {', '.join(differing)}"
            continue
        records, lacking = standing(store, status, before)
        if lacking is None:
            instead = "; ".join(f"not {newer}: {why}" for newer, why in list(unfit.items())[:_MOST])
            return Base(name, status["profile"], values, own, records, instead)
        unfit[name] = lacking
    reasons = "; ".join(f"{name}: {why}" for name, why in list(unfit.items())[:_MOST])
    raise UserError(
        f"rerun {stage}: {'the run has not' if run else 'no run here has'} all that comes before it in the store "
        f"({reasons}). Rerun an earlier stage, or start with `tether run`."
    )


def standing(
    store: ArtifactStore, status: Mapping[str, Any], stages: Sequence[str]
) -> tuple[dict[str, Record], str | None]:
    """The records that a run took for `stages`, by sub-stage, and what is lacking for the first that has none."""
    found: dict[str, Record] = {}
    lacking: str | None = None
    for stage in status["stages"]:
        if stage["name"] not in stages:
            continue
        record = _record(store, stage)
        if isinstance(record, Record):
            found[record.stage] = record
            if (sample := _sample(store, record)) is not None:
                found[sample.stage] = sample
        else:
            lacking = lacking or f"{stage['name']}: {record.reason}"
    return found, lacking


def _record(store: ArtifactStore, stage: Mapping[str, Any]) -> Record | Miss:
    """What a run took for a stage: that artifact, not what its key may have been computed to since."""
    if not stage["key"] or not stage["digest"]:
        return Miss(f"it has no artifact ({stage['state']})")
    return store.lookup(stage["key"], stage["digest"])


def _sample(store: ArtifactStore, scored: Record) -> Record | None:
    """What people were shown, of a record of their scores: a run's status has the one key of the whole stage."""
    digest = scored.inputs.get("sample")
    drawn = store.published_by("human_eval.sample", newest=sys.maxsize) if digest else []
    found = next((each for each in drawn if each.digest == digest), None)
    return found if found is None or isinstance(store.lookup(found.key, found.digest), Record) else None


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
        jobs = [{"job": keyed_values(config.stage_job(each))} for config in (one, other)]
        for change in changes(*jobs):
            if change.part == "config" and change.name != "seed":
                found.setdefault(change.name, each.shown)
    for field in SOURCES if before else ():
        group, _, name = field.partition(".")
        read_again = field == "sft.base" and stage == "sft"
        if not read_again and getattr(getattr(one, group), name) != getattr(getattr(other, group), name):
            found.setdefault(field, "validate")
    return found


def earlier_stages(stage: str) -> list[str]:
    """What the pipeline computes before `stage`."""
    names: list[str] = list(PIPELINE)
    return names[: names.index(stage)]


def run_values(home: Path, run: str) -> dict[str, Any]:
    """The resolved config that a run was started with, as values."""
    return yaml.safe_load((home / "runs" / run / "config.yaml").read_text(encoding="utf-8"))
