"""Move a registered model's aliases for a person, and record who did it and why."""

import time
from collections.abc import Sequence
from pathlib import Path

from components.base.errors import UserError, refuse_credentials
from tasks.tracking.mlflow_client import connect, permitted
from tasks.tracking.model_versions import CHAMPION, Versions, human_eval, withheld_reason
from tasks.tracking.registered_weights import Weights, wanted
from tasks.tracking.registry import Version, versions


def promoted(home: Path, model: str, by: str, because: str) -> str:
    """Set the alias `champion` to the policy `model` and return a sentence for the user.

    The weights are copied into MLflow first, as `mlflow.weights` of the run that judged the policy says. If the policy
    already is champion but lacks weights (for example, if an earlier version of Tether promoted it), they are copied
    now.

    Raises:
        UserError: there is no such version, it is not a policy, or it has not passed human evaluation.
    """
    refuse_credentials("--reason", because)
    registered = versions(home)
    version = _find(registered, model)
    title = f"{version.name}/{version.version}"
    if not version.name.endswith("-policy"):
        raise UserError(f"promote {model}: {title} is not a policy, and only a policy can be champion.")
    if why := withheld_reason(version.tags):
        raise UserError(f"promote {model}: {title} gets no alias: {why}.")
    evaluation = human_eval(version.tags)
    if evaluation.get("state") != "passed":
        why = f"was {evaluation['state']} in run {evaluation['run']}" if evaluation else "has not happened"
        raise UserError(
            f"promote {model}: the human evaluation of {title} {why}, and only a policy that passed its gates is "
            f"promoted. Finish it with `tether people score SHEET`, or rerun human_eval."
        )
    client = connect(home)
    moving = Versions(client, Weights(client, home, wanted(home, evaluation["run"])))
    with permitted(f"promote {title}"):
        problem = moving.copy_weights(version.name, version.version)
    note = f" Its weights are not in MLflow: {problem}." if problem else ""
    if CHAMPION in version.aliases:
        return f"{title} is {CHAMPION} already.{note}"
    before = next((other for other in registered if other.name == version.name and CHAMPION in other.aliases), None)
    with permitted(f"promote {title}"):
        moving.promote(version.name, version.version, by, because, _now(), run=evaluation["run"])
    instead = f", in place of version {before.version}" if before else ""
    return f"{title} is {CHAMPION} now{instead}.{note}"


def demoted(home: Path, model: str, by: str, because: str) -> str:
    """Remove every alias from the version `model` and return a sentence for the user.

    Raises:
        UserError: there is no such version.
    """
    refuse_credentials("--reason", because)
    version = _find(versions(home), model)
    with permitted(f"demote {version.name}/{version.version}"):
        Versions(connect(home)).demote(version.name, version.version, by, because, _now())
    lost = f" It was {' and '.join(version.aliases)}; no version is now." if version.aliases else ""
    return f"{version.name}/{version.version} is demoted: {because}.{lost}"


def _find(registered: Sequence[Version], model: str) -> Version:
    """Return the version that `model` names. Raises UserError if there is none, or if the name has several versions."""
    matches = [version for version in registered if model in version.spellings]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UserError(f"{model} has {len(matches)} versions: name one, such as {model}/{matches[0].version}.")
    there = ", ".join(sorted(f"{version.name}/{version.version}" for version in registered)[:10]) or "none"
    raise UserError(f"{model}: there is no such registered version; there are {there}.")


def _now() -> int:
    return time.time_ns() // 1_000_000
