"""The automation of a Prefect server that notices a run of ours whose process and worker are gone.

It matches the tag of our runs, so it touches nobody else's. A server that was away has heard of no run and takes them
all for dead; those that live say so (`tasks/prefect_flow/alive.py`).
"""

from datetime import timedelta

from prefect.automations import AutomationCore
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture

from tasks.execution.dispatch import NO_HEARTBEAT
from tasks.prefect_flow.server import TAG

DEAD_AFTER_SECONDS = 90
"""Three heartbeats. The server looks every 5 s, so a run that died is noticed within 95 s of its last heartbeat."""
OWN_ENDS = ("GateFailed", "UserError", "MachineMismatch", "CheckFailed", "TetherError", "AwaitingLabels")
"""Names of our own end states: an event is named after its state's name."""
DEAD = "Tether: a flow run whose heartbeat stops has crashed"
"""Its name. Under this name earlier versions made one that matched every run on the server; it is replaced."""


def notice_dead_runs(dead_after: float = DEAD_AFTER_SECONDS, tag: str = TAG) -> None:
    """Make the automation, or bring it up to date.

    Args:
        dead_after: seconds without a heartbeat until a run is set to `Crashed` (Prefect takes 10 or more).
        tag: of the flow runs that are watched.
    """
    heartbeat = "prefect.flow-run.heartbeat"
    ended = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", *OWN_ENDS)}
    automation = AutomationCore(
        name=DEAD,
        description="A run whose process and worker died together would be `Running` forever, and be attached to.",
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *ended},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            match_related={"prefect.resource.id": [f"prefect.tag.{tag}"], "prefect.resource.role": "tag"},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=dead_after),
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=f"{NO_HEARTBEAT}: its worker died.")],
    )
    make_automation(automation)


def make_automation(automation: AutomationCore) -> None:
    """Make an automation, or bring the one of its name up to date; if a person paused it, it stays paused."""
    with get_client(sync_client=True) as client:
        known = client.read_automations_by_name(automation.name)
        if not known:
            client.create_automation(automation)
        for each in known:
            client.update_automation(each.id, automation.model_copy(update={"enabled": each.enabled}))
