"""The form of the pipeline's deployment: its order, that it is folded, and that what it takes is checked."""

from copy import deepcopy
from typing import Any

import pytest
from prefect.utilities.schema_tools.validation import is_valid_schema, validate

from components.base.errors import UserError
from components.ppo.config import CriticConfig
from flows.config.profiles import parse_override
from flows.config.run_config import load_config, to_values
from flows.deployment import flows, form

DEPLOYED = load_config("tiny")
CONFIG = to_values(DEPLOYED)
SCHEMA = form.schema(flows.rlhf, DEPLOYED).model_dump(exclude_unset=True)


def refused(**parameters: Any) -> list[str]:
    """What the server has against a run with these parameters beside the deployed ones."""
    given = {"profile": "tiny", "config": CONFIG, **parameters}
    errors = validate(given, SCHEMA, preprocess=True, ignore_required=True)
    return [f"{list(each.path)} {each.message}" for each in errors]


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
    assert (order[0], order[-1]) == ("from_stage", "changes")
    assert {"name", "note", "tags", "waive", "because", "waived_by"} < set(order)
    assert all(field["description"] for field in SCHEMA["properties"].values()), "the page says what each is"


def test_the_config_is_one_field_a_stage() -> None:
    """It was an input for each of 200 options."""
    stages = SCHEMA["properties"]["changes"]["properties"]
    assert set(stages) == set(CONFIG) and drawn(SCHEMA) == len(SCHEMA["properties"]) - 1 + len(stages) <= 31
    assert all(drawn(stage) == 1 for stage in stages.values())
    assert is_valid_schema(SCHEMA, preprocess=True) is None


def test_an_optional_text_is_an_input_and_no_switch_to_none() -> None:
    kinds = {name: SCHEMA["properties"][name].get("type") for name in ("from_stage", "from_run", "name", "because")}
    assert set(kinds.values()) == {"string"}
    assert refused(from_stage=None, from_run=None, name=None, note=None) == [], "as a client says that there is none"
    assert refused(from_stage="ppo") == [] and "['from_stage']" in refused(from_stage="pqo")[0]


@pytest.mark.parametrize(
    ("group", "changes", "said"),
    [
        ("ppo", {"clip_range": -1}, "clip_range"),
        ("ppo", {"clip_rnge": 0.2}, "clip_rnge"),
        ("sft", {"epochs": "many"}, "many"),
        ("human_eval", {"judge": "people"}, "judge"),
    ],
)
def test_a_group_is_checked_when_a_run_is_created_whole_and_by_its_changes(
    group: str, changes: dict[str, Any], said: str
) -> None:
    config = deepcopy(CONFIG)
    assert refused(config=config) == [] and refused(changes={group: {}, "ppo": {"updates": 7}, "seed": 3}) == []
    config[group] |= changes  # type: ignore[operator]
    for parameters in ({"config": config}, {"changes": {group: changes}}):
        errors = refused(**parameters)
        assert len(errors) == 1 and said in errors[0]
    assert "ppq" in refused(changes={"ppq": {}})[0]


def test_former_names_of_limits_on_kl_are_accepted_and_limits_are_compared() -> None:
    changes = {"ppo": {"kl": {"stop_above": 30}, "watch": {"kl_high": 4}}}
    assert refused(changes=changes) == []
    assert (form.changed(DEPLOYED, changes).ppo.kl.ceiling, form.changed(DEPLOYED, changes).ppo.kl.band) == (30, 4)
    with pytest.raises(UserError, match=r"changes: ppo\.kl\.band \(40\) is above ppo\.kl\.ceiling \(20\)"):
        form.changed(DEPLOYED, {"ppo": {"kl": {"band": 40}}})


def test_changes_are_laid_over_the_deployed_config() -> None:
    changed = form.changed(DEPLOYED, {"ppo": {"kl": {"target": 4.5}}, "seed": 3, "sft": {}})
    expected = deepcopy(CONFIG)
    expected["ppo"]["kl"]["target"] = 4.5  # type: ignore[index,call-overload]
    assert to_values(changed) == expected | {"seed": 3}
    assert form.changed(DEPLOYED, {"ppo": {}}) is DEPLOYED
    without = {"advantage": "rloo", "group_size": 2}
    assert form.changed(DEPLOYED, {"ppo": without}).ppo.critic == CriticConfig(), "the deployed one's are left out"
    with pytest.raises(UserError, match=r"changes: ppo\.critic\.kind \(shared\) has no effect"):
        form.changed(DEPLOYED, {"ppo": without | {"critic": {"kind": "shared"}}})
    with pytest.raises(UserError, match=r"changes: ppo\.clip_range"):
        form.changed(DEPLOYED, {"ppo": {"clip_range": -1}})


def test_changes_that_the_deployed_method_ignores_are_refused() -> None:
    direct = form.changed(DEPLOYED, {"policy": {"method": "dpo", "beta": 0.2}})
    with pytest.raises(UserError, match=r"changes: ppo\.updates has no effect with policy\.method=dpo"):
        form.changed(direct, {"ppo": {"updates": 9}})
    assert form.changed(direct, {"policy": {"method": "ppo"}, "ppo": {"updates": 9}}).ppo.updates == 9


def test_a_gate_that_is_misspelt_in_a_waiver_is_refused_when_the_run_is_created() -> None:
    """A worker said so, once one had begun the run."""
    assert refused(waive=["policy.kl"]) == []
    assert refused(waive=["ppo.kll"])[0].startswith("['waive', 0] 'ppo.kll' is not one of")
    extra = parse_override("gates.extra.ppo.floor={metric: policy/entropy, op: '>=', threshold: 0.2, description: x}")
    own = form.schema(flows.rlhf, load_config("tiny", [extra])).model_dump()
    assert validate({"waive": ["ppo.floor"]}, own, preprocess=True) == [], "a gate of the deployed config"
    with pytest.raises(UserError, match=r"waive = ppo\.kll: there is no such gate.*policy\.kl"):
        form.waivers(["ppo.kll"], "a trial", "Ada", DEPLOYED)


def test_a_waiver_of_the_form_says_why_and_who() -> None:
    assert form.waivers([], "", None, DEPLOYED) == []
    (waiver,) = form.waivers(["policy.kl"], "a trial", "Ada", DEPLOYED)
    assert (waiver.gate, waiver.reason, waiver.user) == ("policy.kl", "a trial", "Ada")
    kl = ["policy.kl"]
    for given in ((kl, "a trial", None), (kl, " ", "Ada"), ([], "a trial", None), ([], None, "Ada")):
        with pytest.raises(UserError, match=r"waived_by|because"):
            form.waivers(*given, DEPLOYED)


def test_a_note_is_kept_as_a_tag() -> None:
    label = form.label("first", "after the new data", ["team=x"])
    assert (label.name, label.tags) == ("first", {"team": "x", "note": "after the new data"})


def test_who_starts_a_run_by_the_form_is_believed_as_long_as_it_is_a_name() -> None:
    assert form.person("started_by", " Ada ", "its schedule") == "Ada"
    assert form.person("started_by", None, "its schedule") == form.person("started_by", " ", "its schedule")
    for name in ("two\nlines", "a" * 101, "http://me:geheim-4711@host"):
        with pytest.raises(UserError, match="started_by"):
            form.person("started_by", name, "its schedule")
