"""The automation of a Prefect server that detects runs whose process and worker have died.

It matches only runs with our tag. A server that was down has received no heartbeats and takes all runs for dead; runs
that are alive then correct it (`tasks/prefect_flow/alive.py`).
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
"""Three heartbeats. The server checks every 5 s, so it notices a dead run within 95 s of the last heartbeat."""
OWN_ENDS = ("GateFailed", "UserError", "MachineMismatch", "CheckFailed", "TetherError", "AwaitingLabels")
"""Names of our own end states. An event is named after its state."""
DEAD = "Tether: a flow run whose heartbeat stops has crashed"
"""The automation's name. An earlier version's automation of this name, which matched every run, is replaced."""


def notice_dead_runs(dead_after: float = DEAD_AFTER_SECONDS, tag: str = TAG) -> None:
    """Create or update the automation.

    Args:
        dead_after: seconds without a heartbeat after which a run is set to `Crashed` (Prefect accepts 10 or more).
        tag: the tag of the flow runs to watch.
    """
    heartbeat = "prefect.flow-run.heartbeat"
    ended = {f"prefect.flow-run.{name}" for name in ("Completed", "Failed", "Cancelled", "Crashed", *OWN_ENDS)}
    automation = AutomationCore(
        name=DEAD,
        description="Without it, a run whose process and worker died together would stay `Running` forever.",
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
    """Create an automation, or update the one of the same name. If a person paused it, it stays paused."""
    with get_client(sync_client=True) as client:
        existing = client.read_automations_by_name(automation.name)
        if not existing:
            client.create_automation(automation)
        for old in existing:
            client.update_automation(old.id, automation.model_copy(update={"enabled": old.enabled}))
