"""Find the accepted data that `data.reference` names, as an input of `validate`."""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from components.base.errors import TetherError, UserError
from components.base.hashing import digest_json
from components.base.nested import group
from components.data.inputs import REFERENCE, kind_of
from components.store.graph import Graph
from components.store.store import ArtifactStore, Record
from flows.config.run_config import RunConfig
from tasks.result import Input
from tasks.runs.config import run_values
from tasks.runs.status import RunStatus, has_run, load_readable, load_status
from tasks.tracking.registry import find_version

logger = logging.getLogger(__name__)

LAST = "last"
ACCEPTED = ("passed", "cached", "waived")
"""States of `validate` whose data have passed the gates, or were accepted by a waiver."""
FOUND, NONE, PREFERENCES = "reference", "none", "preferences"
"""Entries of a run's origin: the digest of the reference (or `none`), and of the preferences compared with it."""


def find_reference(
    config: RunConfig, home: Path, preferences: Collection[str], again: str | None = None
) -> dict[str, Input]:
    """Return the data that `data.reference` names; empty if it names none, or names `last` and there is none yet.

    A name is resolved once. A retry or rerun uses what its run resolved it to, and for the same preferences of a
    project `last` always means what it meant the first time. Otherwise, data accepted in the meantime would change the
    keys of a repeated command, and everything it has computed would be computed again.

    Args:
        preferences: digests of this run's preferences. `last` skips runs with the same preferences.
        again: the earlier run that this one retries or reruns.

    Raises:
        UserError: there is no such run or model, its data were not accepted, or they are incomplete in the store.
    """
    reference = config.data.reference
    if reference is None:
        return {}
    pinned = _pinned(config, home, preferences, again)
    if pinned == NONE:
        logger.info("data.reference: there was none when it was resolved for these preferences, so nothing is compared")
        return {}
    store = ArtifactStore(home)
    if pinned is not None:
        return {REFERENCE: stored_input(store, pinned, store.path(pinned))}
    if reference == LAST:
        record = _last(config, home, set(preferences))
    else:
        record = _accepted(_run_of(reference, home), reference, home)
    if record is None:
        logger.info("data.reference: this home has no accepted data with other preferences yet, so nothing is compared")
        return {}
    return {REFERENCE: stored_input(store, record.digest, store.path(record))}


def resolved_reference(config: RunConfig, data: Mapping[str, Input]) -> dict[str, str]:
    """Return what `data.reference` was resolved to, as entries for the origin of the run that reads `data`."""
    if config.data.reference is None:
        return {}
    preferences = [source.digest for name, source in data.items() if kind_of(name) == "preferences"]
    return {FOUND: data[REFERENCE].digest if REFERENCE in data else NONE, PREFERENCES: _together(preferences)}


def _together(preferences: Collection[str]) -> str:
    return digest_json(sorted(preferences))


def stored_input(store: ArtifactStore, digest: str, path: Path) -> Input:
    """Return an artifact of the store as an input."""
    imported = Graph.of(store).rests_on_import([digest])
    return Input(digest=digest, path=path, stored=True, imported=imported)


def _pinned(config: RunConfig, home: Path, preferences: Collection[str], again: str | None) -> str | None:
    """Return the digest that an earlier run resolved this name to for these preferences, or `NONE`.

    None if no earlier run did. Data that are no longer complete in the store are skipped.
    """
    reference = config.data.reference
    earlier = [load_status(home, again)] if again else []
    if reference == LAST:
        earlier += load_readable(home)[0]
    for status in earlier:
        if status.origin.get(PREFERENCES) != _together(preferences):
            continue
        values = run_values(home, status.run)
        if values.get("project") != config.project or group(values, "data").get("reference") != reference:
            continue
        pinned = status.origin[FOUND]
        try:
            if pinned != NONE:
                ArtifactStore(home).path(pinned)
        except TetherError as error:
            logger.warning("data.reference: the data that run %s was compared with are gone: %s", status.run, error)
            continue
        logger.info("data.reference: as resolved for run %s", status.run)
        return pinned
    return None


def _last(config: RunConfig, home: Path, preferences: set[str]) -> Record | None:
    """Return the project's newest accepted data that have other preferences and are complete in the store."""
    for status in load_readable(home)[0]:
        if status.stage("validate").state in ACCEPTED and run_values(home, status.run).get("project") == config.project:
            # All records of a key have the same inputs. The files of skipped runs are not checked, because a home may
            # hold hundreds of runs with the same preferences.
            records = ArtifactStore(home).published(status.stage("validate").key or "none")
            if not records or _preferences(records[0]) == preferences:
                continue
            record = _record(status, home)
            if isinstance(record, Record):
                logger.info("data.reference: the preferences are compared with those of the run %s", status.run)
                return record
    return None


def _preferences(record: Record) -> set[str]:
    return {digest for name, digest in record.inputs.items() if kind_of(name) == "preferences"}


def _run_of(name: str, home: Path) -> RunStatus:
    if has_run(home, name):
        return load_status(home, name)
    version = find_version(home, name)
    run = version.tags.get("tether.run", "") if version is not None else ""
    if not has_run(home, run):
        why = f"its run {run} is not in this home" if run else "there is no such run or registered model"
        raise UserError(
            f"data.reference = {name}: {why}. Give a run of this home (`tether runs` lists them), a registered model "
            f"such as tether-policy@champion, or {LAST}."
        )
    return load_status(home, run)


def _accepted(status: RunStatus, name: str, home: Path) -> Record:
    stage = status.stage("validate")
    if stage.state not in ACCEPTED:
        raise UserError(
            f"data.reference = {name}: the data of the run {status.run} were not accepted (validate: {stage.state}). "
            "Give a run whose validate passed."
        )
    record = _record(status, home)
    if not isinstance(record, Record):
        raise UserError(
            f"data.reference = {name}: the data of the run {status.run} can't be read from the store: {record}. "
            f"`tether rerun validate --from {status.run}` computes them again."
        )
    return record


def _record(status: RunStatus, home: Path) -> Record | str:
    """Return the record of a run's data, or why there is none."""
    stage = status.stage("validate")
    if not stage.key or not stage.digest:
        return "the run has no validated data"
    record = ArtifactStore(home).lookup(stage.key, stage.digest)
    return record if isinstance(record, Record) else record.reason
