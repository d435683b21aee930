"""The schedule that `tether deploy --cron` makes. Prefect keeps those that people made on a deployment's page."""

from typing import NamedTuple
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from pydantic import ValidationError

from components.base.errors import UserError

OURS = "tether-deploy"
"""The slug of the schedule that `--cron` makes."""


class Schedule(NamedTuple):
    """A schedule of the pipeline."""

    cron: str
    timezone: str
    active: bool | None
    """None: as in the schedule that it replaces, or paused if there is none."""

    def checked(self) -> CronSchedule:
        """Return it as Prefect's; raises UserError if its times or its zone are not valid."""
        try:
            return CronSchedule(cron=self.cron, timezone=self.timezone)
        except ValidationError as error:
            raise UserError(
                f"--cron {self.cron!r} --timezone {self.timezone!r}: {error.errors()[0]['msg']}. Expected five fields, "
                f"such as '0 3 * * 1', and a name like Europe/Berlin."
            ) from error


def set_schedule(client: SyncPrefectClient, deployment: UUID, wanted: Schedule | None) -> list[str]:
    """Create or change our schedule of a deployment, and return a line that says what became of it.

    Args:
        client: of the server.
        deployment: the deployment's id.
        wanted: replaces the schedule of an earlier deploy; None leaves that unchanged.
    """
    before = next((old for old in client.read_deployment(deployment).schedules if old.slug == OURS), None)
    if wanted is None:
        return [f"Schedule kept: {_told(before)} (--cron changes it, its page removes it)."] if before else []
    cron, active, was = wanted.checked(), bool(wanted.active), ""
    if before is None:
        new = DeploymentScheduleCreate(schedule=cron, active=active, slug=OURS)
        client.create_deployment_schedules(deployment, [new])
    else:
        active = before.active if wanted.active is None else active
        client.update_deployment_schedule(deployment, before.id, active, cron)
        was = f"; before: {_told(before)}"
    start = "" if active else " (its page or --active starts it)"
    return [f"Schedule: {cron.cron} {cron.timezone}, {'active' if active else 'paused'}{start}{was}."]


def _told(old: DeploymentSchedule) -> str:
    # A person may have changed its kind on the page.
    when = f"{cron.cron} {cron.timezone}" if isinstance(cron := old.schedule, CronSchedule) else str(cron)
    return f"{when}{' with parameters of its own' * bool(old.parameters)}, {'active' if old.active else 'paused'}"
