"""Alerts: the Prefect server notifies a webhook of runs that need a person, and of a disk that is nearly full.

The server sends them, so they arrive even if the failed process is gone. The webhook's address may contain a token: it
is stored in a block, which the server encrypts and does not show.
"""

import shutil
import socket
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import get_client
from prefect.events import emit_event
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import RelatedResource
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings
from prefect.types import SecretDict
from prefect.utilities.urls import url_for
from pydantic import SecretStr

from components.base.errors import UserError
from flows.deployment.automations import make_automation
from flows.deployment.recovery import FLOWS
from flows.doctor import DISK_GB
from tasks.prefect_flow.server import TAG

BLOCK = "tether-alerts"
"""The name of the webhook's block."""
RUNS = "Tether: a run needs a person"
LABELS = "Tether: people's labels are scored"
DISK = "Tether: a disk is nearly full"
SUBJECTS = {
    "GateFailed": "a gate failed",
    "Crashed": "crashed",
    "AwaitingLabels": "waits for people's labels",
    "UserError": "failed",
    "MachineMismatch": "failed",
    "CheckFailed": "failed",
    "TetherError": "failed",
    "Failed": "failed",
}
"""The end states that cause an alert, with the words for each. An event is named after its state."""
DISK_LOW = "tether.disk-low"
DISK_AGAIN_SECONDS = 6 * 3600.0
"""Seconds between two alerts about a disk."""


def alert(url: str, tag: str = TAG) -> None:
    """Make the server POST each alert to `url` as JSON. Alerts of an earlier call go there too.

    The fields are `text` (the whole alert in one sentence, which chat services show), `what`, `run`, `state`, `message`
    and `url`.

    Args:
        url: an http or https address.
        tag: the tag of the flow runs to watch.

    Raises:
        UserError: `url` is not an http or https address.
    """
    check_address(url)
    headers = SecretDict({"Content-Type": "application/json"})
    block = Webhook(url=SecretStr(url), headers=headers).save(BLOCK, overwrite=True)
    for automation in _automations(cast(UUID, block), tag):
        make_automation(automation)


def check_address(url: str) -> None:
    """Raise UserError if `url` is not a webhook's address."""
    try:
        parts = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UserError(f"--alert: {error}. Expected an address such as https://chat.example/hooks/ID.") from error
    if parts.scheme not in ("http", "https") or not parts.host:
        raise UserError("--alert: expected a chat webhook's address, which starts with http:// or https://.")


def stop_alerts() -> bool:
    """Remove the automations that `alert` made, and return whether there were any."""
    with get_client(sync_client=True) as client:
        found = [each for name in (RUNS, LABELS, DISK) for each in client.read_automations_by_name(name)]
        for each in found:
            client.delete_automation(each.id)
    return bool(found)


def _automations(block: UUID, tag: str) -> list[AutomationCore]:
    def trigger(events: Collection[str], resource: str, related: list[dict[str, Any]]) -> EventTrigger:
        tagged = {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}
        return EventTrigger(
            expect=set(events),
            match={"prefect.resource.id": resource},
            match_related=[tagged, *related],
            posture=Posture.Reactive,
            threshold=1,
        )

    def flow(*names: str) -> dict[str, Any]:
        return {"prefect.resource.role": "flow", "prefect.resource.name": list(names)}

    ended = [f"prefect.flow-run.{name}" for name in SUBJECTS]
    return [
        AutomationCore(
            name=RUNS,
            description="Notifies a webhook of failed gates, crashes, other failures and runs that await labels.",
            # Not `compute`: the pipeline that ordered the stage orders it again, or fails.
            trigger=trigger(ended, "prefect.flow-run.*", [flow(*FLOWS)]),
            actions=[CallWebhook(block_document_id=block, payload=_run_payload())],
        ),
        AutomationCore(
            name=LABELS,
            description="Notifies a webhook when a filled sheet has been scored and its gates have passed.",
            trigger=trigger(["prefect.flow-run.Completed"], "prefect.flow-run.*", [flow("human-eval")]),
            actions=[CallWebhook(block_document_id=block, payload=_run_payload())],
        ),
        AutomationCore(
            name=DISK,
            description="Notifies a webhook when the disk of a worker's home is nearly full.",
            trigger=trigger([DISK_LOW], "tether.home.*", []),
            actions=[CallWebhook(block_document_id=block, payload=_DISK_PAYLOAD)],
        ),
    ]


_DISK_PAYLOAD = """\
{"text": {{ ("Tether: " ~ event.payload.message) | tojson }}, "what": "disk low", "run": null, "state": null,
 "message": {{ event.payload.message | tojson }}, "url": null}"""


def _run_payload() -> str:
    """Return the template of a run's alert, which the server fills in for each event."""
    nobody = UUID(int=0)
    page = (url_for("flow-run", nobody) or "").replace(str(nobody), '" ~ flow_run.id ~ "')
    cases = "".join(f'{{% elif name == "{name}" %}}{{% set what = "{text}" %}}' for name, text in SUBJECTS.items())
    return f"""\
{{% set state = event.payload.get("validated_state", {{}}) %}}{{% set name = state.get("name", "") %}}\
{{% set message = state.get("message") or "" %}}{{% set url = "{page}" %}}\
{{% if name == "Completed" %}}{{% set what = "people's labels are scored" %}}{cases}\
{{% else %}}{{% set what = name %}}{{% endif %}}\
{{"text": {{{{ ("Tether: " ~ flow_run.name ~ ": " ~ what ~ ". " ~ message ~ " " ~ url) | tojson }}}}, \
"what": {{{{ what | tojson }}}}, "run": {{{{ flow_run.name | tojson }}}}, "state": {{{{ name | tojson }}}}, \
"message": {{{{ message | tojson }}}}, "url": {{{{ url | tojson }}}}}}"""


class DiskWatch:
    """Notifies the server when the disk of a home is nearly full."""

    def __init__(
        self, home: Path, url: str | None = None, login: str | None = None, least: float = DISK_GB * 1e9
    ) -> None:
        """`url` and `login` are as in `crash_watch`; `least` is the free space in bytes below which the server is
        told."""
        self._home, self._least = home, least
        self._settings = {} if url is None else {PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: login}
        self._told: float | None = None

    def look(self) -> None:
        """Notify the server if the free space is below the limit and it was not told recently."""
        try:
            free = shutil.disk_usage(self._home).free
        except OSError:
            return  # if the home is away, its runs report that
        late = self._told is not None and time.monotonic() < self._told + DISK_AGAIN_SECONDS
        if free >= self._least or late:
            return
        self._told = time.monotonic()
        host = socket.gethostname()
        message = (
            f"the disk of {self._home} on {host} has {free / 1e9:.1f} GB left. `tether store gc --dry-run` lists what "
            "can be removed."
        )
        tag = {"prefect.resource.id": f"prefect.tag.{TAG}", "prefect.resource.role": "tag"}
        with temporary_settings(self._settings):
            emit_event(
                DISK_LOW,
                {"prefect.resource.id": f"tether.home.{host}", "prefect.resource.name": str(self._home)},
                related=[RelatedResource.model_validate(tag)],
                payload={"message": message},
            )
