"""Show the progress of a run's labels in MLflow: as tags of the run and of its human_eval, and as curves."""

import time
from pathlib import Path

from tasks.runs.awaited_labels import LabelProgress
from tasks.runs.journal import Sent
from tasks.tracking.mlflow_client import connect

STAGE = "human_eval"


def log_progress(home: Path, run: str, progress: LabelProgress) -> bool:
    """Send MLflow the progress of the labels, and return whether it has the run. Errors of MLflow are passed on.

    The tags are `tether.labels` (`57 of 144 labels (39 %)`) and `tether.review` (the review page's address); the
    metrics `human_eval/labels_answered` and `human_eval/labels_share` are curves over time.
    """
    sent = Sent.load(home / "runs" / run)
    if sent.parent is None:
        return False
    from mlflow.entities import Metric, RunTag

    now, client = round(time.time() * 1000), connect(home)
    tags = [RunTag("tether.labels", progress.text)]
    if progress.address:
        tags.append(RunTag("tether.review", progress.address))
    metrics = [
        Metric("human_eval/labels_answered", float(progress.answered), now, progress.answered),
        Metric("human_eval/labels_share", progress.share, now, progress.answered),
    ]
    for of in dict.fromkeys(filter(None, (sent.parent, sent.stages.get(STAGE)))):
        client.log_batch(of, metrics=metrics, tags=tags)
    return True
