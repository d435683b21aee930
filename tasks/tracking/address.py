"""Where a run of ours stands on MLflow's pages."""

from pathlib import Path

from components.base.redaction import redacted
from tasks.runs.journal import Sent
from tasks.tracking.client import tracking_uri


def has_pages(home: Path) -> bool:
    """Return whether MLflow is a server; a database has no page."""
    return tracking_uri(home).startswith("http")


def mlflow_page(home: Path, run: str, stage: str = "", file: str = "") -> str | None:
    """Return the address of a stage's run (without one, the whole run's), or of a file of it, which the page shows.

    None where MLflow has no pages, or does not have the run (yet).
    """
    sent = Sent.load(home / "runs" / run)
    found = sent.stages.get(stage) if stage else sent.parent
    if not has_pages(home) or sent.experiment is None or found is None:
        return None
    return f"{redacted(tracking_uri(home)).rstrip('/')}/{run_link(sent.experiment, found, file)}"


def mlflow_file(home: Path, run: str, file: str) -> str | None:
    """Where a browser downloads a file of the whole run; None as `mlflow_page`."""
    sent = Sent.load(home / "runs" / run)
    if not has_pages(home) or sent.parent is None:
        return None
    return f"{redacted(tracking_uri(home)).rstrip('/')}/get-artifact?path={file}&run_uuid={sent.parent}"


def run_link(experiment_id: str, run: str, file: str = "") -> str:
    """Where MLflow's page of a run is, from its root, or of a file of the run, which it shows there."""
    artifact = f"/artifacts/{file}" if file else ""
    return f"#/experiments/{experiment_id}/runs/{run}{artifact}?workflowType=machine_learning"
