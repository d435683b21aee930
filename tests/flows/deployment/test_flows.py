"""The flows of a Prefect server where no server is needed. (With one: tests/operations/.)"""

import logging
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.utilities.schema_tools import ValidationError, validate

from components.base.errors import UserError
from flows.config.profiles import parse_override
from flows.config.run_config import load_config, to_values
from flows.deployment import flows, form, register
from flows.deployment.recovery import attempts_of
from flows.deployment.register import deploy, with_absolute_paths
from tasks.execution.attempts import Attempts


def test_a_run_to_go_on_from_without_the_stage_is_the_users_mistake() -> None:
    state = flows.rlhf.fn(config=load_config("tiny"), from_run="20261122-001155-ab12")
    assert (state.name, state.is_failed()) == ("UserError", True)
    assert state.message == "from_run = 20261122-001155-ab12: also give the stage, with from_stage."


def test_every_path_that_a_deployment_keeps_holds_from_a_workers_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("data.preferences", "data.demonstrations", "data.prompts", "sft.base", "reward.refresh.from_run",
             "human_eval.guidelines")  # fmt: skip
    changes = [parse_override(f"{name}={name}") for name in names]
    for name in names:
        Path(name).mkdir()
    config = with_absolute_paths(load_config("tiny", changes))
    assert config.reward.refresh is not None
    kept: tuple[object, ...] = (config.data.preferences, config.data.demonstrations, config.data.prompts)
    kept = (*kept, config.sft.base, config.reward.refresh.from_run, config.human_eval.guidelines)
    assert [*kept] == [str(tmp_path / name) for name in names]
    (tmp_path / "rm").mkdir()
    listed = "ppo.rewards=[{source: 'function:mine:score'}, {source: model:rm}, {source: model:lab/other}]"
    rewards = with_absolute_paths(load_config("tiny", [parse_override(listed)])).ppo.rewards
    assert rewards is not None
    function, ours, hub = (each.model_dump() for each in rewards)
    assert (function["root"], ours["source"], ours["name"]) == (str(tmp_path), f"model:{tmp_path / 'rm'}", "rm")
    assert hub["source"] == "model:lab/other"
    several = [parse_override("data.preferences=[data.preferences, owner/name]")]
    kept_of_several = with_absolute_paths(load_config("tiny", several)).data.preferences
    assert kept_of_several == (str(tmp_path / "data.preferences"), "owner/name")
    for name in names:
        Path(name).rmdir()
    assert with_absolute_paths(load_config("tiny", changes)).data.prompts == "data.prompts", "it may be the hub's"


@pytest.mark.parametrize("preferences", ["null", "pairs.jsonl", "[pairs.jsonl, owner/name]"])
def test_prefects_form_takes_one_source_and_several(preferences: str) -> None:
    config = to_values(load_config("tiny", [parse_override(f"data.preferences={preferences}")]))
    schema = form.schema(flows.rlhf, load_config("tiny")).model_dump()
    assert validate({"config": config}, schema) == []
    config["data"]["preferences"] = 3  # type: ignore[index,call-overload]
    with pytest.raises(ValidationError):
        validate({"config": config}, schema, raise_on_error=True)


def test_a_pipeline_that_orders_from_the_pool_it_runs_on_is_refused(tmp_path: Path) -> None:
    """With two of them in a pool that takes two runs, both waited for ever for a place for their PPO."""
    config = load_config("tiny", [parse_override("runners.ppo=cpu")])
    with pytest.raises(UserError, match=r"runners\.ppo = cpu.*Set runners\.ppo to local"):
        flows.refuse_own_pool(config, "cpu")
    flows.refuse_own_pool(config, None)  # a terminal's run keeps no place there
    flows.refuse_own_pool(load_config("tiny", [parse_override("runners.ppo=gpu")]), "cpu")
    with pytest.raises(UserError, match=r"runners\.ppo = cpu"):
        deploy(tmp_path, "tiny", config, None)


@pytest.mark.parametrize(
    ("changes", "waived", "said"),
    [
        ({}, [], "runners.reward = cpu"),
        ({"runners": {"reward": "local", "sft": "cpu"}}, [], "runners.sft = cpu"),
        ({"ppo": {"clip_range": -1}}, [], "changes: ppo.clip_range"),
        ({"runners": {"reward": "local"}}, ["ppo.kll"], "waive = ppo.kll: there is no such gate"),
    ],
)
def test_a_mistake_in_the_form_ends_the_run_before_it_begins(
    changes: dict[str, Any], waived: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server refuses the two last ones, where its check is not switched off."""
    monkeypatch.setenv("TETHER_HOME", str(tmp_path))
    monkeypatch.setattr(flows, "pool_of", lambda flow_run: "cpu")
    monkeypatch.setattr(flows, "get_run_logger", lambda: logging.getLogger("run"))
    config = load_config("tiny", [parse_override("runners.reward=cpu")])
    why = {"because": "a trial", "waived_by": "Ada"} if waived else {}
    state = flows.rlhf.fn(config=config, changes=changes, waive=waived, **why)
    assert state.name == "UserError" and said in str(state.message)
    assert not (tmp_path / "runs").exists()


def test_a_crashed_run_is_tried_again_as_often_as_its_form_says() -> None:
    config = to_values(load_config("tiny"))
    run = FlowRun(flow_id=uuid4(), parameters={"config": config, "changes": {"retries": 7}})
    assert attempts_of(run) == Attempts(7, float(str(config["retry_seconds"])))


def test_a_deployments_environment_leaves_the_gpu_to_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wins over the worker's: CUDA_VISIBLE_DEVICES=1 of a second worker became 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert "CUDA_VISIBLE_DEVICES" not in register._environment(tmp_path)


@pytest.mark.parametrize("password", ["kT/9pQ==", "a#b", "a?b", "8/x", "p@ss/w"])
def test_no_job_variable_holds_a_password(password: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "TETHER_STORE"):
        monkeypatch.setenv(name, f"postgresql://me:{password}@db:5432/mlflow")
    assert password not in str(register._environment(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000/a@b")
    assert register._environment(tmp_path)["MLFLOW_TRACKING_URI"] == "http://127.0.0.1:5000/a@b"


def test_deploy_says_which_worker_each_pool_needs() -> None:
    done = [register.Deployed(f"compute/{pool}", pool, None) for pool in ("cpu", "gpu", "gpu")]
    lines = register.describe(done)
    assert len(lines) == 5 and lines[-2] == "A worker: prefect worker start --pool cpu --type process --limit 2"
    assert "A worker: prefect worker start --pool gpu --type process --limit 1" in lines
