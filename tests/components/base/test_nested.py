"""Options chosen by dotted names."""

from pydantic import JsonValue

from components.base.nested import selected


def test_what_is_chosen_keeps_its_groups_and_its_names_as_they_are() -> None:
    """A name may hold a dot (a pattern's, in `ppo.rules`), and an empty group is a value."""
    rules: dict[str, JsonValue] = {"no.dots": "x", "none": {}}
    values: dict[str, JsonValue] = {"a": {"b": 1, "c": {"d": 2}}, "rules": rules, "n": [{"a": 1}]}
    assert selected(values, {"a.b", "a.c.d", "rules.no.dots", "rules.none", "n"}.__contains__) == values
    assert selected(values, {"a.c.d", "n"}.__contains__) == {"a": {"c": {"d": 2}}, "n": [{"a": 1}]}
