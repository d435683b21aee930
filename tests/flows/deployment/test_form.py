"""The form of the pipeline's deployment: its order, that it is folded, and that what it takes is checked as before."""

from copy import deepcopy
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from components.base.errors import UserError
from flows.config.run_config import load_config, to_values
from flows.deployment import flows, form

SCHEMA = flows.rlhf.parameters.model_dump(exclude_unset=True)
CONFIG = to_values(load_config("tiny"))


def drawn(schema: dict[str, Any]) -> int:
    """How many inputs Prefect's page draws for a schema."""
    if "$ref" in schema:
        schema = SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]]
    for of in ("allOf", "anyOf"):
        if of in schema:
            return max(drawn(each) for each in schema[of])
    return sum(drawn(each) for each in schema["properties"].values()) if schema.get("properties") else 1


def test_what_people_change_comes_first_and_the_config_last() -> None:
    """`from_stage` was 30,000 pixels down."""
    order = sorted(SCHEMA["properties"], key=lambda name: SCHEMA["properties"][name]["position"])
    assert (order[0], order[-1]) == ("from_stage", "config")
    assert {"name", "note", "tags", "waive", "because", "waived_by"} < set(order)
    assert SCHEMA["required"] == ["config"]


def test_the_config_is_one_field_a_stage() -> None:
    """It was an input for each of 200 options."""
    assert drawn(SCHEMA) < 25
    assert is_valid_schema(SCHEMA, preprocess=True) is None


@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        ("ppo", {"clip_range": -1}, "clip_range"),
        ("ppo", {"clip_rnge": 0.2}, "clip_rnge"),
        ("sft", {"epochs": "many"}, "many"),
        ("human_eval", {"judge": "people"}, "judge"),
    ],
)
def test_a_folded_group_is_checked_when_a_run_is_created(group: str, changes: dict[str, Any], said: str) -> None:
    config = deepcopy(CONFIG)
    assert validate({"config": config}, SCHEMA, preprocess=True, ignore_required=True) == []
    config[group] |= changes
    errors = validate({"config": config}, SCHEMA, preprocess=True, ignore_required=True)
    assert len(errors) == 1 and said in f"{list(errors[0].path)} {errors[0].message}"


def test_a_waiver_of_the_form_says_why_and_who() -> None:
    assert form.waivers([], "", None) == []
    (waiver,) = form.waivers(["ppo.kl"], "a trial", "Ada")
    assert (waiver.gate, waiver.reason, waiver.user) == ("ppo.kl", "a trial", "Ada")
    for given in ((["ppo.kl"], "a trial", None), (["ppo.kl"], " ", "Ada"), ([], "a trial", None)):
        with pytest.raises(UserError, match="waived_by"):
            form.waivers(*given)


def test_a_note_is_kept_as_a_tag() -> None:
    label = form.label("first", "after the new data", ["team=x"])
    assert (label.name, label.tags) == ("first", {"team": "x", "note": "after the new data"})
