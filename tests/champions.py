"""Promotion of policies of `tiny`, which by themselves get no alias."""

import json
import time
from pathlib import Path

from tasks.runs.journal import current_user
from tasks.tracking.mlflow_client import connect
from tasks.tracking.model_versions import Versions
from tasks.tracking.registered_weights import Weights, Which


def make_champion(
    home: Path, version: str = "1", name: str = "tether-policy", run: str = "", weights: Which = "champion"
) -> None:
    """Promote a version as a run of a profile with all thresholds would have done; `run`: that run."""
    client = connect(home)
    tags = client.get_model_version(name, version).tags
    if "tether.withheld" in tags:
        client.delete_model_version_tag(name, version, "tether.withheld")
    if "tether.human_eval" in tags:
        judged = json.loads(tags["tether.human_eval"]) | {"state": "passed"}
        client.set_model_version_tag(name, version, "tether.human_eval", json.dumps(judged))
    versions, now = Versions(client, Weights(client, home, weights)), time.time_ns() // 1_000_000
    versions.promote(name, version, current_user(), "a test", now, run)
