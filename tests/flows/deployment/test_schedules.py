"""Deploying again leaves schedules as people have set them, and names deployments that can't run any more."""

from pathlib import Path

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.schedules import CronSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings

from components.base.errors import UserError
from flows.config.run_config import load_config, to_values
from flows.deployment.register import deploy
from flows.deployment.schedules import Schedule
from flows.deployment.stale import findings, problem_of
from tests.servers import PrefectServer

CONFIG = to_values(load_config("tiny"))


@pytest.mark.parametrize(("cron", "zone"), [("every day", "UTC"), ("0 3 * * 1", "Atlantis")])
def test_a_schedule_that_is_none_is_the_users_to_mend(cron: str, zone: str) -> None:
    with pytest.raises(UserError, match=r"--cron .*Expected five fields"):
        Schedule(cron, zone, None).checked()


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

        ran = client.create_flow_run_from_deployment(old.id)
        assert ran.state is not None and ran.state.is_scheduled(), "Prefect lets it fail when it starts"

        def again(name: str, cron: str = "", active: bool | None = None) -> list[str]:
            return deploy(tmp_path, name, config, Schedule(cron, "UTC", active) if cron else None)[1]

        kept, stale = again("kept")
        assert schedules() == [("0 3 * * 1", True), ("0 9 * * *", True)]
        assert kept == "Schedule kept: 0 3 * * 1 UTC, active (--cron changes it, its page removes it)."
        assert stale.startswith("Stale: rlhf/old ") and "whitening" in stale
        assert [each.what for each in findings()] == ["deployment"]
        assert again("old", "0 3 * * 1") == ["Schedule: 0 3 * * 1 UTC, paused (its page or --active starts it)."]
        assert findings() == [] and schedules("old") == [("0 3 * * 1", False)]
        assert again("kept", "0 4 * * 1") == ["Schedule: 0 4 * * 1 UTC, active; before: 0 3 * * 1 UTC, active."]
        assert schedules() == [("0 4 * * 1", True), ("0 9 * * *", True)], "a schedule that was started stays active"
        again("kept", "0 4 * * 1", active=False)
        assert schedules() == [("0 4 * * 1", False), ("0 9 * * *", True)]
