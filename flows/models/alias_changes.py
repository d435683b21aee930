"""Move a registered model's aliases for a person, and record who did it and why."""

import time
from collections.abc import Sequence
from pathlib import Path

from components.base.errors import UserError, refuse_credentials
from tasks.tracking.mlflow_client import connect, permitted
from tasks.tracking.model_versions import CHAMPION, Versions, human_eval, withheld_reason
from tasks.tracking.registered_weights import Weights, wanted
from tasks.tracking.registry import Version, versions


def promoted(home: Path, asked: str, by: str, because: str) -> str:
    """Set the alias `champion` to the policy `asked` and return a sentence for the user.

    The weights are copied into MLflow first, as `mlflow.weights` of the run that judged the policy says. If the policy
    already is champion but lacks weights (for example, if an earlier version of Tether promoted it), they are copied
    now.

    Raises:
        UserError: there is no such version, it is not a policy, or it has not passed human evaluation.
    """
    refuse_credentials("--reason", because)
    registered = versions(home)
    found = _find(registered, asked)
    shown = f"{found.name}/{found.version}"
    if not found.name.endswith("-policy"):
        raise UserError(f"promote {asked}: {shown} is not a policy, and only a policy can be champion.")
    if why := withheld_reason(found.tags):
        raise UserError(f"promote {asked}: {shown} gets no alias: {why}.")
    judged = human_eval(found.tags)
    if judged.get("state") != "passed":
        why = f"was {judged['state']} in run {judged['run']}" if judged else "has not happened"
        raise UserError(
            f"promote {asked}: the human evaluation of {shown} {why}, and only a policy that passed its gates is "
            f"promoted. Finish it with `tether people score SHEET`, or rerun human_eval."
        )
    client = connect(home)
    moving = Versions(client, Weights(client, home, wanted(home, judged["run"])))
    with permitted(f"promote {shown}"):
        problem = moving.bring_weights(found.name, found.version)
    note = f" Its weights are not in MLflow: {problem}." if problem else ""
    if CHAMPION in found.aliases:
        return f"{shown} is {CHAMPION} already.{note}"
    before = next((each for each in registered if each.name == found.name and CHAMPION in each.aliases), None)
    with permitted(f"promote {shown}"):
        moving.promote(found.name, found.version, by, because, _now(), run=judged["run"])
    instead = f", in place of version {before.version}" if before else ""
    return f"{shown} is {CHAMPION} now{instead}.{note}"


def demoted(home: Path, asked: str, by: str, because: str) -> str:
    """Remove every alias from the version `asked` and return a sentence for the user.

    Raises:
        UserError: there is no such version.
    """
    refuse_credentials("--reason", because)
    found = _find(versions(home), asked)
    with permitted(f"demote {found.name}/{found.version}"):
        Versions(connect(home)).demote(found.name, found.version, by, because, _now())
    lost = f" It was {' and '.join(found.aliases)}; no version is now." if found.aliases else ""
    return f"{found.name}/{found.version} is demoted: {because}.{lost}"


def _find(registered: Sequence[Version], asked: str) -> Version:
    """Return the version that `asked` names. Raises UserError if there is none, or if the name has several versions."""
    found = [each for each in registered if asked in each.spellings]
    if len(found) == 1:
        return found[0]
    if found:
        raise UserError(f"{asked} has {len(found)} versions: name one, such as {asked}/{found[0].version}.")
    there = ", ".join(sorted(f"{each.name}/{each.version}" for each in registered)[:10]) or "none"
    raise UserError(f"{asked}: there is no such registered version; there are {there}.")


def _now() -> int:
    return time.time_ns() // 1_000_000
