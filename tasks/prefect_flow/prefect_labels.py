"""People's labels on a Prefect server: their progress on the page of the waiting run, and the order to score them."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.exceptions import ObjectNotFound
from prefect.utilities.urls import url_for

from components.base.hashing import digest_json
from components.base.redaction import redacted
from components.base.text import markdown, markdown_code
from tasks.runs.awaited_labels import LabelProgress

SHARE, ABOUT = "labels-answered", "labels"
"""Keys of the two artifacts: a progress bar, and the text next to it."""
SCORING = "human-eval/score"
"""The deployment that scores labels."""


def show_progress(page: str, run: str, progress: LabelProgress) -> None:
    """Show the progress of the labels on the page of the flow run that waits for them, replacing earlier progress.

    Raises:
        ValueError: `page` is not a flow run's address.
    """
    flow_run = flow_run_of(page)
    lines = [f"**{progress.text}**", ""]
    if progress.address:
        lines += [f"[Review page]({progress.address}): each rater needs their personal link.", ""]
    if progress.raters:
        lines += ["| rater | answered | asked for |", "|---|---:|---:|"]
        lines += [f"| {markdown(name)} | {done} | {total} |" for name, (done, total) in progress.raters.items()]
    if not progress.address:
        lines += ["", f"`tether people status {run}` counts the answers in the raters' files."]
    with get_client(sync_client=True) as client:
        _put_artifact(client, flow_run, SHARE, "progress", 100 * progress.share, f"Labels of run {run}")
        _put_artifact(client, flow_run, ABOUT, "markdown", "\n".join(lines), f"Labels of run {run}")


def _put_artifact(
    client: SyncPrefectClient, flow_run: UUID, key: str, kind: str, data: float | str, about: str
) -> None:
    """Create an artifact of a flow run, or replace its content."""
    existing = client.read_artifacts(
        artifact_filter=ArtifactFilter(
            key=ArtifactFilterKey(any_=[key]), flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run])
        )
    )
    if existing:
        client.update_artifact(existing[0].id, ArtifactUpdate(data=data, description=about))
    else:
        client.create_artifact(ArtifactCreate(key=key, type=kind, data=data, description=about, flow_run_id=flow_run))


def order_scoring(run: str, sheets: Path) -> str | None:
    """Let a worker score a run's complete labels. Return the flow run's page, or None if there is no deployment.

    A repeated call for the same files returns the existing flow run. `sheets` is a file or folder that the worker sees.
    """
    with get_client(sync_client=True) as client:
        try:
            deployment = client.read_deployment_by_name(SCORING)
        except ObjectNotFound:
            return None
        parameters = {"sheet": str(sheets), "run": run, "scored_by": "when the labels were complete"}
        ordered = client.create_flow_run_from_deployment(
            deployment.id, parameters=parameters, idempotency_key=f"score {run} {_state_of(sheets)}"
        )
    return redacted(url_for("flow-run", ordered.id) or "")


def flow_run_of(page: str) -> UUID:
    """Return the id at the end of a flow run's address.

    Raises:
        ValueError: the address has no id.
    """
    return UUID(urlsplit(page).path.rstrip("/").rpartition("/")[2])


def awaiting(folder: Path) -> str:
    """Return the message of the state in which a run waits for labels."""
    return (
        f"Each rater gets a file of {markdown_code(str(folder / 'raters'))}, or a personal link to the review page. "
        f"The artifact {ABOUT} says how far they are."
    )


def _state_of(sheets: Path) -> str:
    files: Sequence[Path] = sorted(sheets.iterdir()) if sheets.is_dir() else [sheets]
    about = [[file.name, (stat := file.stat()).st_size, stat.st_mtime_ns] for file in files if file.is_file()]
    return digest_json(about)[:16]
