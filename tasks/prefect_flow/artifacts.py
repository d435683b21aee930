"""Artifacts on the page of a flow run whose content is replaced while the run goes on."""

from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey


def put_artifact(client: SyncPrefectClient, flow_run: UUID, key: str, kind: str, data: float | str, about: str) -> None:
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
