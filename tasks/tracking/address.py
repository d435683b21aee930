"""Addresses of our runs on MLflow's pages."""

from pathlib import Path

from components.base.redaction import redacted
from tasks.runs.journal import Sent
from tasks.tracking.mlflow_client import tracking_uri


def has_pages(home: Path) -> bool:
    """Return whether MLflow is a server; a plain database has no pages."""
    return tracking_uri(home).startswith("http")


def mlflow_page(home: Path, run: str, stage: str = "", file: str = "") -> str | None:
    """Return the address of a stage's MLflow run (without a stage: of the whole run), or of a file shown there.

    None if MLflow has no pages, or does not have the run (yet).
    """
    sent = Sent.load(home / "runs" / run)
    id_ = sent.stages.get(stage) if stage else sent.parent
    return _page(home, run_link(sent.experiment, id_, file)) if sent.experiment is not None and id_ else None


def mlflow_file(home: Path, run: str, file: str) -> str | None:
    """Return the address to download a file of the whole run; None in the same cases as `mlflow_page`."""
    parent = Sent.load(home / "runs" / run).parent
    return _page(home, f"get-artifact?path={file}&run_uuid={parent}") if parent else None


def _page(home: Path, relative: str) -> str | None:
    return f"{redacted(tracking_uri(home)).rstrip('/')}/{relative}" if has_pages(home) else None


def run_link(experiment_id: str, run: str, file: str = "") -> str:
    """Return the address of a run's page, or of a file shown there, relative to MLflow's root."""
    artifact = f"/artifacts/{file}" if file else ""
    return f"#/experiments/{experiment_id}/runs/{run}{artifact}?workflowType=machine_learning"
