"""Deploying again leaves schedules as people have set them, and names deployments that can't run any more."""

from pathlib import Path
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from components.base.errors import UserError
from flows.config.run_config import load_config, to_values
from flows.deployment.register import deploy
from flows.deployment.schedules import OURS, Schedule, plan
from flows.deployment.stale import findings, problem_of
from tests.servers import PrefectServer

CONFIG = to_values(load_config("tiny"))


def stored(cron: str, active: bool, slug: str | None = None, **parameters: object) -> DeploymentSchedule:
    return DeploymentSchedule(
        id=uuid4(), schedule=CronSchedule(cron=cron, timezone="UTC"), active=active, slug=slug, parameters=parameters
    )


def shown(planned: list[DeploymentScheduleCreate]) -> list[tuple[str, bool, str | None]]:
    return [(each.schedule.cron, each.active, each.slug) for each in planned]


def test_deploying_without_a_schedule_keeps_every_schedule_and_says_so() -> None:
    """It deleted them all, without a word."""
    planned, lines = plan([stored("0 3 * * 1", True, OURS), stored("0 9 * * *", True, None, from_stage="ppo")], None)
    assert shown(planned) == [("0 9 * * *", True, None), ("0 3 * * 1", True, OURS)]
    assert planned[0].parameters == {"from_stage": "ppo"}
    assert [line.startswith("Schedule kept") for line in lines] == [True, True]


@pytest.mark.parametrize(("asked", "active"), [(None, True), (True, True), (False, False)])
def test_a_schedule_that_a_person_started_stays_active(asked: bool | None, active: bool) -> None:
    """The page's command, repeated, paused it."""
    for slug in (OURS, None):  # None: earlier versions made it
        planned, lines = plan([stored("0 3 * * 1", True, slug)], Schedule("0 3 * * 1", "UTC", asked))
        assert shown(planned) == [("0 3 * * 1", active, OURS)]
        assert ("before: 0 3 * * 1 UTC, active" in lines[0]) != active


def test_another_time_replaces_our_schedule_alone_and_says_what_was_before() -> None:
    planned, lines = plan(
        [stored("0 3 * * 1", True, OURS), stored("@daily", False)], Schedule("0 4 * * 1", "UTC", None)
    )
    assert shown(planned) == [("@daily", False, None), ("0 4 * * 1", True, OURS)]
    assert "before: 0 3 * * 1 UTC, active" in lines[1]
    assert shown(plan([], Schedule("0 4 * * 1", "UTC", None))[0]) == [("0 4 * * 1", False, OURS)], "new: paused"


def test_a_schedule_is_removed_only_when_that_is_asked() -> None:
    planned, lines = plan([stored("0 3 * * 1", True, OURS), stored("@daily", True)], None, remove=True)
    assert shown(planned) == [("@daily", True, None)] and "Schedule removed: 0 3 * * 1 UTC, active." in lines


@pytest.mark.parametrize(("cron", "zone"), [("every day", "UTC"), ("0 3 * * 1", "Atlantis")])
def test_a_schedule_that_is_none_is_the_users_to_mend(cron: str, zone: str) -> None:
    with pytest.raises(UserError, match=r"--cron .*Expected five fields"):
        plan([], Schedule(cron, zone, None))


def test_parameters_that_an_upgrade_no_longer_takes_are_named() -> None:
    assert problem_of({"profile": "tiny", "config": CONFIG}) is None
    gone = {**CONFIG, "ppo": {**CONFIG["ppo"], "whitening": True}}
    assert "ppo.whitening" in (problem_of({"config": gone}) or "")
    assert "force" in (problem_of({"config": CONFIG, "force": True}) or "")


@pytest.mark.servers
def test_a_server_keeps_a_started_schedule_over_a_new_deployment_and_names_a_stale_one(
    server: PrefectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", server.api)
    with temporary_settings({PREFECT_API_URL: server.api}), get_client(sync_client=True) as client:
        config = load_config("tiny")

        def schedules(name: str = "kept") -> list[tuple[str, bool]]:
            found = client.read_deployment_by_name(f"rlhf/{name}").schedules
            return sorted((each.schedule.cron, each.active) for each in found)

        deploy(tmp_path, "kept", config, Schedule("0 3 * * 1", "UTC", True))
        deployed = client.read_deployment_by_name("rlhf/kept").id
        client.create_deployment_schedules(deployed, [(CronSchedule(cron="0 9 * * *"), True)])  # as on its page
        deploy(tmp_path, "old", config, None)
        old = client.read_deployment_by_name("rlhf/old")
        gone = {**old.parameters, "config": {**old.parameters["config"], "whitening": True}}
        # As they are after an upgrade: the server's own check would refuse them.
        client.update_deployment(old.id, DeploymentUpdate(parameters=gone, enforce_parameter_schema=False))

        _, lines = deploy(tmp_path, "kept", config, None)
        assert schedules() == [("0 3 * * 1", True), ("0 9 * * *", True)]
        assert any(line.startswith("Stale: rlhf/old ") and "whitening" in line for line in lines), lines
        assert [each.what for each in findings()] == ["deployment"]
        deploy(tmp_path, "old", config, Schedule("0 3 * * 1", "UTC", None))
        assert findings() == [] and schedules("old") == [("0 3 * * 1", False)]
        deploy(tmp_path, "old", config, None, remove_schedule=True)
        assert schedules("old") == [], "the server keeps a schedule with a slug that it is not given"
        deploy(tmp_path, "kept", config, Schedule("0 4 * * 1", "UTC", None))
        assert schedules() == [("0 4 * * 1", True), ("0 9 * * *", True)]
        deploy(tmp_path, "kept", config, None, remove_schedule=True)
        assert schedules() == [("0 9 * * *", True)]
