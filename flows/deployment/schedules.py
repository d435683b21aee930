"""Decide what happens to a deployment's schedules when it is registered again: the server may delete missing ones."""

from collections.abc import Iterable
from typing import NamedTuple

from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from pydantic import ValidationError

from components.base.errors import UserError

OURS = "tether-deploy"
"""The slug of the schedule that `--cron` makes. Other schedules were made by people on the page."""


class Schedule(NamedTuple):
    """A schedule of the pipeline."""

    cron: str
    timezone: str
    active: bool | None
    """None: as in the schedule that it replaces, or paused if there is none."""


def plan(
    existing: Iterable[DeploymentSchedule], wanted: Schedule | None, remove: bool = False
) -> tuple[list[DeploymentScheduleCreate], list[str]]:
    """Return the schedules for a deployment, and a line for a person about each.

    Args:
        existing: the deployment's current schedules.
        wanted: replaces the schedule of an earlier deploy; None leaves that unchanged.
        remove: remove the schedule of an earlier deploy.

    Raises:
        UserError: `wanted` is not a valid schedule.
    """
    kept, lines, before = [], [], None
    new = None if wanted is None else _cron(wanted)
    for each in existing:
        same = new is not None and each.slug is None and not each.parameters and _when(each) == _when(new)
        if each.slug == OURS or same:  # earlier versions gave it no slug
            before = each
        else:
            kept.append(_again(each))
            lines.append(f"Schedule kept: {_told(each)}; it was made on the deployment's page.")
    if new is None:
        if before is not None and remove:
            lines.append(f"Schedule removed: {_told(before)}.")
        elif before is not None:
            kept.append(_again(before))
            lines.append(f"Schedule kept: {_told(before)} (--no-schedule removes it, --cron changes it).")
        return kept, lines
    assert wanted is not None
    active = wanted.active if wanted.active is not None else before is not None and before.active
    new = new.model_copy(update={"active": active, "parameters": before.parameters if before is not None else {}})
    was = f"; before: {_told(before)}" if before is not None and _told(before) != _told(new) else ""
    start = "" if active else " (its page or --active starts it)"
    lines.append(f"Schedule: {_told(new)}{start}{was}.")
    return [*kept, new], lines


def _cron(wanted: Schedule) -> DeploymentScheduleCreate:
    try:
        return DeploymentScheduleCreate(schedule=CronSchedule(cron=wanted.cron, timezone=wanted.timezone), slug=OURS)
    except (ValidationError, ValueError) as error:
        reasons = error.errors() if isinstance(error, ValidationError) else [{"msg": str(error)}]
        raise UserError(
            f"--cron {wanted.cron!r} --timezone {wanted.timezone!r}: {reasons[0]['msg']}. Expected five fields, such "
            f"as '0 3 * * 1', and a name like Europe/Berlin."
        ) from error


def _again(each: DeploymentSchedule) -> DeploymentScheduleCreate:
    return DeploymentScheduleCreate(
        schedule=each.schedule, active=each.active, parameters=each.parameters, slug=each.slug
    )


def _told(each: DeploymentSchedule | DeploymentScheduleCreate) -> str:
    own = " with parameters of its own" if each.parameters else ""
    return f"{_when(each)}{own}, {'active' if each.active else 'paused'}"


def _when(each: DeploymentSchedule | DeploymentScheduleCreate) -> str:
    match each.schedule:
        case CronSchedule() as cron:
            return f"{cron.cron} {cron.timezone or 'UTC'}"
        case IntervalSchedule() as interval:
            return f"every {interval.interval}"
        case RRuleSchedule() as rule:
            return f"{rule.rrule} {rule.timezone or 'UTC'}"
        case _:
            return "no time"
