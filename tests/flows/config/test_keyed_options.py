"""Every option of a stage is in its key, or stands here with the reason why it cannot change a result."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from components.base.nested import flatten
from components.base.settings import Settings, keyed_values
from flows.config.profiles import parse_override
from flows.config.run_config import load_config
from tasks.execution.keying import whole_job
from tasks.stages import STAGES
from tests.reference import _models

NOT_KEYED = {
    "the digest of what it names is an input of the stage": {
        "DataConfig.preferences", "DataConfig.votes", "DataConfig.judge_preferences", "DataConfig.demonstrations",
        "DataConfig.prompts", "DataConfig.judge_columns", "DataConfig.suite", "DataConfig.decontaminate",
        "DataConfig.deployment_prompts", "DataConfig.reference", "HubConfig.subset", "HubConfig.revision",
        "HubConfig.streaming", "SupportDeskConfig.judge_pairs", "SftConfig.base", "SftConfig.keep",
        "RefreshConfig.from_run", "RewardConfig.suites", "HumanEvalConfig.guidelines", "EvaluationConfig.tasks",
        "EvaluationConfig.probes", "EvaluationConfig.judge", "ModelReward.source", "RulesConfig.file",
        "RulesConfig.root", "FunctionReward.root",
    },
    "a stage that goes on from a checkpoint ends with the same bytes": {
        "PassesConfig.checkpoint_every", "PassesConfig.checkpoint_minutes", "OptimizerConfig.checkpoint_whole",
        "PpoConfig.checkpoint_every", "PpoConfig.checkpoint_minutes",
    },
    "the same operations are computed again, for less memory": {"OptimizerConfig.gradient_checkpointing"},
    "what waits too long ends without a result": {"Runtime.rank_timeout"},
    "it divides the rows among processes, and their order stays": {"DataConfig.processes"},
    "what calls too long, or in other portions, gets the same answers or ends without a result": {
        "EndpointConfig.patience", "EndpointConfig.timeout", "HttpReward.batch_size", "HttpReward.patience",
        "HttpReward.timeout", "RulesConfig.timeout", "_CalledReward.timeout",
    },
    "it says where a server is, how many requests it gets at once and how long to wait for it": {
        "RolloutConfig.url", "RolloutConfig.folder", "RolloutConfig.sleep", "RolloutConfig.concurrency",
        "RolloutConfig.timeout", "RolloutConfig.retries",
    },
    "it says what happens to a finished sheet, not what its score is": {"HumanEvalConfig.when_complete"},
}  # fmt: skip
PROFILES = (
    (), ("policy.method=dpo",), ("policy.method=kto",), ("policy.method=online_dpo",),
    ("policy.method=best_of_n",), ("ppo.advantage=rloo", "ppo.group_size=2"),
)  # fmt: skip
ANOTHER = "another value"


def classes(model: type[BaseModel], seen: set[type[BaseModel]]) -> set[type[BaseModel]]:
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for each in _models(field.annotation):
                classes(each, seen)
    return seen


def owned(model: type[BaseModel], name: str) -> str:
    """The field's name, after that of the class that defines it."""
    return next(f"{each.__name__}.{name}" for each in model.__mro__ if name in inspect.get_annotations(each))


def mutated(settings: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Every copy of `settings` with one field changed: its dotted name, its class and name, and the copy."""
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, BaseModel):
            for path, owner, inner in mutated(value, f"{prefix}{name}."):
                yield path, owner, settings.model_copy(update={name: inner})
        else:
            yield prefix + name, owned(type(settings), name), settings.model_copy(update={name: ANOTHER})


def test_an_option_that_is_in_no_key_stands_here_with_the_reason() -> None:
    found = set[type[BaseModel]]()
    for stage in STAGES.values():
        classes(stage.load_job(), found)
    unkeyed = {
        owned(model, name)
        for model in found
        for name, field in model.model_fields.items()
        if field.json_schema_extra == {"keyed": False}
    }
    assert unkeyed == set().union(*NOT_KEYED.values())


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("options", PROFILES, ids=" ".join)
def test_another_value_of_any_option_is_another_key(stage: str, options: tuple[str, ...]) -> None:
    config = load_config("tiny", [parse_override(option) for option in options])
    job, reasons = config.stage_job(config.stage(stage)), set().union(*NOT_KEYED.values())
    assert isinstance(job, Settings)
    before, tried = keyed_values(job), 0
    with warnings.catch_warnings(action="ignore"):  # the value has another type
        for path, owner, other in mutated(job):
            expected = owner not in reasons and job.uses(path)
            assert (keyed_values(other) != before) == expected, path
            assert expected or whole_job(other, {}) != whole_job(job, {}), path
            tried += 1
    assert tried >= len(flatten(before))
