"""Alerts: the Prefect server notifies a webhook of runs that need a person, and of a disk that is nearly full.

The server sends them, so they arrive even if the failed process is gone. The webhook's address may contain a token: it
is stored in a block, which the server encrypts and does not show.
"""

import json
import shutil
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast
from uuid import UUID

import httpx
from prefect.automations import AutomationCore
from prefect.blocks.webhook import Webhook
from prefect.events import emit_event
from prefect.events.actions import CallWebhook
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import RelatedResource
from prefect.types import SecretDict
from prefect.utilities.urls import url_for
from pydantic import SecretStr

from components.base.errors import UserError
from flows.deployment.automations import make_automation
from flows.doctor import DISK_GB
from tasks.prefect_flow.server import TAG

FLOWS = ("rlhf", "human-eval")
"""The flows that people start. Not `compute`: the pipeline that ordered the stage orders it again, or fails."""
BLOCK = "tether-alerts"
"""The name of the webhook's block."""
RUNS = "Tether: a run needs a person"
LABELS = "Tether: people's labels are scored"
DISK = "Tether: a disk is nearly full"
SCORED = "Completed"
"""The end state that causes an alert only if a scoring ends in it."""
SUBJECTS = {
    "GateFailed": "a gate failed",
    "Crashed": "crashed",
    "AwaitingLabels": "waits for people's labels",
    "UserError": "failed",
    "MachineMismatch": "failed",
    "CheckFailed": "failed",
    "TetherError": "failed",
    "Failed": "failed",
    SCORED: "people's labels are scored",
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


def _automations(block: UUID, tag: str) -> list[AutomationCore]:
    def notify(name: str, what: str, events: Iterable[str], of: str, flows: Sequence[str], body: str) -> AutomationCore:
        related = [{"prefect.resource.role": "flow", "prefect.resource.name": list(flows)}] if flows else []
        return AutomationCore(
            name=name,
            description=f"Notifies a webhook {what}.",
            trigger=EventTrigger(
                expect=set(events),
                match={"prefect.resource.id": of},
                match_related=[_tagged(tag), *related],
                posture=Posture.Reactive,
                threshold=1,
            ),
            actions=[CallWebhook(block_document_id=block, payload=body)],
        )

    ended = [f"prefect.flow-run.{name}" for name in SUBJECTS if name != SCORED]
    scored, run, body = [f"prefect.flow-run.{SCORED}"], "prefect.flow-run.*", _run_payload()
    return [
        notify(RUNS, "of failed gates, crashes, other failures and runs that await labels", ended, run, FLOWS, body),
        notify(LABELS, "when a filled sheet is scored and its gates have passed", scored, run, FLOWS[1:], body),
        notify(DISK, "when the disk of a worker's home is nearly full", [DISK_LOW], "tether.home.*", (), _DISK_PAYLOAD),
    ]


def _tagged(tag: str) -> dict[str, Any]:
    return {"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}


_DISK_PAYLOAD = """\
{"text": {{ ("Tether: " ~ event.payload.message) | tojson }}, "what": "disk low", "run": null, "state": null,
 "message": {{ event.payload.message | tojson }}, "url": null}"""


def _run_payload() -> str:
    """Return the template of a run's alert, which the server fills in for each event."""
    nobody = UUID(int=0)
    page = (url_for("flow-run", nobody) or "").replace(str(nobody), '" ~ flow_run.id ~ "')
    return f"""\
{{% set state = event.payload.get("validated_state", {{}}) %}}{{% set name = state.get("name", "") %}}\
{{% set message = state.get("message") or "" %}}{{% set url = "{page}" %}}\
{{% set what = {json.dumps(SUBJECTS)}.get(name, name) %}}\
{{"text": {{{{ ("Tether: " ~ flow_run.name ~ ": " ~ what ~ ". " ~ message ~ " " ~ url) | tojson }}}}, \
"what": {{{{ what | tojson }}}}, "run": {{{{ flow_run.name | tojson }}}}, "state": {{{{ name | tojson }}}}, \
"message": {{{{ message | tojson }}}}, "url": {{{{ url | tojson }}}}}}"""


def report_low_disk(home: Path, least: float = DISK_GB * 1e9) -> bool:
    """Notify the server if the disk of a home has less than `least` bytes free, and return whether it was notified."""
    try:
        free = shutil.disk_usage(home).free
    except OSError:
        return False  # if the home is away, its runs report that
    if free >= least:
        return False
    host = socket.gethostname()
    message = (
        f"the disk of {home} on {host} has {free / 1e9:.1f} GB left. `tether store gc --dry-run` lists what can be "
        "removed."
    )
    emit_event(
        DISK_LOW,
        {"prefect.resource.id": f"tether.home.{host}", "prefect.resource.name": str(home)},
        related=[RelatedResource.model_validate(_tagged(TAG))],
        payload={"message": message},
    )
    return True
