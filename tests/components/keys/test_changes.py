"""What differs between two keys is named, all of it, and nothing else."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from components.base.hashing import digest_json
from components.keys.changes import Change, changes, in_a_line, nearest

names = st.sampled_from(["a", "b", "kl", "lr"])
values = st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 0.5, 1.0]) | st.sampled_from(["x", ""])
values |= st.lists(st.integers(0, 1), max_size=2)
jobs = st.recursive(st.dictionaries(names, values, max_size=3), lambda each: st.dictionaries(names, each, max_size=2))
flat = st.dictionaries(names, st.text("ab", min_size=1, max_size=2), max_size=3)
groups = {"job": jobs, **dict.fromkeys(("inputs", "source", "task", "libraries"), flat)}
parts = st.fixed_dictionaries({"stage": st.just("ppo"), **groups})

PARTS = {
    "stage": "ppo",
    "job": {"seed": 0, "runtime": {"threads": 2}, "ppo": {"kl": {"target": 3.0}}},
    "inputs": {"sft": "a" * 64},
    "source": {"components": "1", "components.ppo": "1", "components.ppo.learner": "1"},
    "task": {"support-desk": "1"},
    "libraries": {"torch": "2.12.0"},
}


@given(parts, parts)
def test_there_is_a_change_exactly_where_the_key_is_another(one, other) -> None:
    assert (changes(one, other) == []) == (digest_json(one) == digest_json(other))
    assert changes(one, copy.deepcopy(one)) == []


@given(parts, parts)
def test_the_way_back_has_the_same_changes_turned_round(one, other) -> None:
    back = {"changed": "changed", "added": "removed", "removed": "added"}
    turned = [Change(c.part, c.name, back[c.change], c.now, c.before) for c in changes(other, one)]
    assert changes(one, other) == turned


@given(parts, st.sampled_from(["inputs", "job", "source", "task", "libraries"]), names)
def test_one_more_entry_is_the_one_change(one, group, name) -> None:
    assume(name not in one[group])
    other = {**one, group: {**one[group], name: "new"}}
    assert [(c.change, c.before, c.now) for c in changes(one, other)] == [("added", None, "new")]


@pytest.mark.parametrize(
    ("group", "path", "value", "expected", "line"),
    [
        ("inputs", ("sft",), "b" * 64, ("input", "sft", "changed"), "input sft aaaaaaaaaaaa -> bbbbbbbbbbbb"),
        ("job", ("ppo", "kl", "target"), 2.0, ("config", "ppo.kl.target", "changed"), "ppo.kl.target 3.0 -> 2.0"),
        ("job", ("ppo", "kl", "form"), None, ("config", "ppo.kl.form", "added"), "ppo.kl.form added (null)"),
        ("job", ("runtime", "threads"), 1, ("runtime", "runtime.threads", "changed"), "runtime.threads 2 -> 1"),
        ("source", ("components.ppo.learner",), "2", ("source", "components/ppo/learner.py", "changed"),
         "components/ppo/learner.py changed"),
        ("source", ("components.ppo",), "2", ("source", "components/ppo/__init__.py", "changed"),
         "components/ppo/__init__.py changed"),
        ("source", ("components.training.optim",), "2", ("source", "components/training/optim.py", "added"),
         "components/training/optim.py added"),
        ("task", ("support-desk",), "2", ("task", "support-desk", "changed"), "the built-in task support-desk changed"),
        ("libraries", ("torch",), "2.13.0", ("library", "torch", "changed"), "library torch 2.12.0 -> 2.13.0"),
    ],
)  # fmt: skip
def test_each_kind_of_change_is_named(group, path, value, expected, line) -> None:
    other = copy.deepcopy(PARTS)
    inside = other[group]
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    [found] = changes(PARTS, other)
    assert found in {found}, "a value like any other"
    assert (found.part, found.name, found.change) == expected
    assert str(found) == line


def test_one_and_true_and_one_point_nothing_are_other_values_as_in_the_key() -> None:
    seeds = [{**PARTS, "job": {"seed": seed}} for seed in (1, True, 1.0)]
    assert all(len(changes(one, other)) == (one is not other) for one in seeds for other in seeds)


def test_the_options_of_a_task_that_is_no_longer_the_source_are_not_named_beside_it() -> None:
    """A first run on own data named `data.generator`, which nothing reads there."""
    task = {"job": {"data": {"split": 1, "generator": {"pairs": 4}}}, "task": {"desk": "a"}}
    own = {"job": {"data": {"split": 1}}, "task": {}}
    for one, other in ((task, own), (own, task)):
        assert [(each.part, each.name) for each in changes(one, other)] == [("task", "desk")]
    dropped = changes(task | {"task": {}}, own)
    assert [(each.name, each.change) for each in dropped] == [("data.generator", "removed")], "or no change is left"


def test_a_group_that_became_empty_is_named() -> None:
    assert [str(c) for c in changes({**PARTS, "job": {"a": {}}}, {**PARTS, "job": {}})] == ["a removed ({})"]


def test_the_nearest_has_the_fewest_changes_and_is_the_newest_among_equals() -> None:
    far = {**PARTS, "job": {}, "libraries": {}}
    near = {**PARTS, "libraries": {"torch": "2.11.0"}}
    owner, found = nearest(PARTS, [("far", far), ("new", near), ("old", near)])
    assert (owner, [c.name for c in found]) == ("new", ["torch"])
    assert nearest(PARTS, []) is None


def test_a_line_names_the_first_few_and_counts_the_rest() -> None:
    other = {**PARTS, "job": {"seed": 1}, "inputs": {"sft": "b" * 64}}
    found = changes(PARTS, other)
    assert in_a_line(found, most=1) == "input sft aaaaaaaaaaaa -> bbbbbbbbbbbb and 3 more"
    assert in_a_line(found).endswith(" and 1 more") and in_a_line(found[:3]) == ", ".join(map(str, found[:3]))
    assert in_a_line(found).startswith("input sft") and in_a_line(found[:1]) == str(found[0])


def test_a_long_value_is_cut_to_forty_letters_and_a_text_stands_without_quotes() -> None:
    job = {"a": "x" * 40, "b": "y" * 41, "c": ["z"] * 20}
    before, after = {**PARTS, "job": dict.fromkeys(job, "-")}, {**PARTS, "job": job}
    expected = ["a - -> " + "x" * 40, "b - -> " + "y" * 37 + "...", "c - -> " + ('["z",' + '"z",' * 9)[:37] + "..."]
    assert [str(change) for change in changes(before, after)] == expected
