"""The flows of a Prefect server where no server is needed. (With one: tests/test_operations.py.)"""

from pathlib import Path

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools import ValidationError, validate

from flows.config.profiles import parse_override
from flows.config.run_config import load_config, to_values
from flows.deployment import flows
from flows.deployment.register import with_absolute_paths


def test_a_run_to_go_on_from_without_the_stage_is_the_users_mistake() -> None:
    state = flows.rlhf.fn(load_config("tiny"), from_run="20261122-001155-ab12")
    assert (state.name, state.is_failed()) == ("UserError", True)
    assert state.message == "from_run = 20261122-001155-ab12: name the stage too, with from_stage."


def test_every_path_that_a_deployment_keeps_holds_from_a_workers_folder_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("data.preferences", "data.demonstrations", "data.prompts", "sft.base", "reward.refresh.from_run")
    changes = [parse_override(f"{name}={name}") for name in names]
    for name in names:
        Path(name).mkdir()
    config = with_absolute_paths(load_config("tiny", changes))
    assert config.reward.refresh is not None
    kept = (config.data.preferences, config.data.demonstrations, config.data.prompts, config.sft.base)
    assert [*kept, config.reward.refresh.from_run] == [str(tmp_path / name) for name in names]
    several = [parse_override("data.preferences=[data.preferences, owner/name]")]
    kept_of_several = with_absolute_paths(load_config("tiny", several)).data.preferences
    assert kept_of_several == (str(tmp_path / "data.preferences"), "owner/name")
    for name in names:
        Path(name).rmdir()
    assert with_absolute_paths(load_config("tiny", changes)).data.prompts == "data.prompts", "it may be the hub's"


@pytest.mark.parametrize("preferences", ["null", "pairs.jsonl", "[pairs.jsonl, owner/name]"])
def test_prefects_form_takes_one_source_and_several(preferences: str) -> None:
    config = to_values(load_config("tiny", [parse_override(f"data.preferences={preferences}")]))
    schema = parameter_schema(flows.rlhf).model_dump()
    assert validate({"config": config}, schema) == []
    config["data"]["preferences"] = 3  # type: ignore[index,call-overload]
    with pytest.raises(ValidationError):
        validate({"config": config}, schema, raise_on_error=True)
