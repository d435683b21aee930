"""What the store has to keep: what runs, pins and registered models need. Asks MLflow; imports it when called."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.artifacts import ArtifactStore
from components.errors import UserError
from components.store_needs import read_pins
from tasks.registry import versions
from tasks.status import list_runs, load_status

KEPT_RUNS = 10
"""The newest runs, which are kept without being asked for."""


def needs(store: ArtifactStore, keep_runs: int = KEPT_RUNS) -> dict[str, set[str]]:
    """Key or digest to who needs it: the newest runs, those that run or wait for labels, pins, registered models.

    Raises:
        UserError: a run, a pin or MLflow's registry can't be read, so that what they need isn't known.
    """
    found: dict[str, set[str]] = defaultdict(set)

    def need(who: str, names: Iterable[str]) -> None:
        for name in names:
            found[name].add(who)

    held = store.held_keys()
    pins = {**read_pins(store.local), **read_pins(store.place)}
    for place, run in enumerate(_runs(store.home)):
        status = _status(store.home, run)
        wanted = run_needs(status)
        # A worker computes on when the run that ordered it has died.
        at_work = status["state"] in ("running", "awaiting_labels") or held & set(wanted)
        if place < keep_runs or at_work or run in pins:
            need(f"run {run}", wanted)
    need("at work", held)
    for run, names in pins.items():
        need(f"pin {run}", names)
    for model, names in registered(store.home).items():
        need(f"model {model}", names)
    return dict(found)


def run_needs(status: Mapping[str, Any]) -> list[str]:
    """Keys and digests that a run's stages have."""
    return [stage[name] for stage in status["stages"] for name in ("key", "digest") if stage[name]]


def registered(home: Path) -> dict[str, list[str]]:
    """Every registered model's versions, and the keys and digests that each was made from.

    Raises:
        UserError: there is a registry, and it can't be asked.
    """
    return {f"{each.name} version {each.version}": _made_from(each.tags) for each in versions(home)}


def _made_from(tags: Mapping[str, str]) -> list[str]:
    """Digests and key in a version's tags, as tasks/lineage.py writes them."""
    lineage = [tag for tag in tags if tag.startswith("lineage.") and tag.endswith("digest")]
    return [tags[tag] for tag in [*lineage, "tether.key"] if tag in tags]


def _runs(home: Path) -> list[str]:
    try:
        return list_runs(home)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"a run.json in {home / 'runs'} can't be read ({error}), so what that run needs isn't known. Mend it, or "
            f"remove the run's folder."
        ) from error


def _status(home: Path, run: str) -> dict[str, Any]:
    try:
        return load_status(home, run)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{home / 'runs' / run / 'run.json'} can't be read ({error}), so what that run needs isn't known. Mend it, "
            f"or remove the run's folder."
        ) from error
