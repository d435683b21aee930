"""Why a stage was computed, or whose result it took: made when the store is asked, kept in the run's status."""

from collections.abc import Mapping
from typing import Any

from components import key_changes
from components.artifacts import ArtifactStore, Miss, Record
from components.key_changes import Change
from tasks.computing import ASKED

FIRST = "no earlier record"


def hit(record: Record, pinned: bool = False) -> dict[str, Any]:
    """The explanation of a result that was found; `pinned` if a rerun took it as the artifact of its run."""
    return {"outcome": "hit", "run": record.run, "pinned": pinned}


def miss(store: ArtifactStore, stage: str, key: str, parts: Mapping[str, Any], found: Miss, run: str) -> dict[str, Any]:
    """The explanation of a stage that is to be computed.

    Args:
        store: where earlier records are looked for.
        stage: its (sub-)stage's name.
        key: its key.
        parts: what the key is made of.
        found: what the look-up of the key gave.
        run: the run that computes it.

    Returns:
        JSON: `outcome` ("computed"), `run`, `because` (`asked`, `damaged`, `first` or `changed`), `reason` (why the
        look-up failed), and where something changed `compared_with` ({run, key}) and `changes` (each with the
        fields of `Change`), of the earlier record with the fewest.
    """
    told = {"outcome": "computed", "run": run, "reason": found.reason}
    if found.reason == ASKED:
        return {**told, "because": "asked"}
    if store.attempts(key):
        return {**told, "because": "damaged"}
    nearest = key_changes.nearest(parts, ((record, record.parts) for record in store.published_by(stage)))
    if nearest is None:
        return {**told, "because": "first"}
    other, found_changes = nearest
    return {
        **told,
        "because": "changed",
        "compared_with": {"run": other.run, "key": other.key},
        "changes": [change._asdict() for change in found_changes],
    }


def in_a_line(told: Mapping[str, Any]) -> str:
    """An explanation in a few words, for the console."""
    if told["outcome"] == "hit":
        return f"{'taken as it is, ' if told['pinned'] else ''}computed by {told['run']}"
    if told["because"] == "changed":
        return key_changes.in_a_line(changes(told))
    return {"asked": told["reason"], "damaged": f"the record is damaged: {told['reason']}", "first": FIRST}[
        told["because"]
    ]


def changes(told: Mapping[str, Any]) -> list[Change]:
    """The changes that an explanation holds."""
    return [Change(**each) for each in told.get("changes", ())]


def lines(document: Mapping[str, Any]) -> list[str]:
    """What `tether explain` prints of `status.load_explanations`."""
    origin, shown = document["origin"], document["stages"]
    width = max((len(name) for each in shown for name in (each["name"], *each["explained"])), default=0) + 2
    again = f", {origin['stage']} again from run {origin['from']}" if "from" in origin else ""
    out = [f"run {document['run']}{again}"]
    for each in shown:
        if not each["explained"]:
            why = "not run" if each["state"] == "not_run" else f"nothing was kept ({each['state']})"
            out.append(f"{each['name']:<{width}}{why}")
        for name, told in each["explained"].items():
            first, *rest = _story(told)
            out += [f"{name:<{width}}{first}", *(f"{'':<{width}}{line}" for line in rest)]
    return out


def _story(told: Mapping[str, Any]) -> list[str]:
    if told["outcome"] == "hit":
        return [f"hit: {in_a_line(told)}"]
    if told["because"] != "changed":
        return [f"computed: {in_a_line(told)}"]
    compared = told["compared_with"]
    nearest = f"computed: compared with the nearest earlier record (run {compared['run']}, key {compared['key'][:12]})"
    return [nearest, *(f"  {change}" for change in changes(told))]
