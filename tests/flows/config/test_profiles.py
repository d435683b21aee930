"""YAML, `--set` and `extends:`: what is typed arrives, and what can't be meant is refused."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from components.base.errors import UserError
from flows.config import yaml as yaml_text
from flows.config.profiles import apply_overrides, lay, parse_override, profile_name, read_profile
from flows.config.run_config import load_config
from tests.waiting import PATIENCE

PARTS = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
PATHS = st.lists(PARTS, min_size=1, max_size=4)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=20)
)


@given(PATHS, SCALARS)
def test_a_scalar_that_is_set_arrives_as_it_was(path: list[str], value: object) -> None:
    text = yaml_text.dump({"value": value}).removeprefix("value:").strip()
    override = parse_override(f"{'.'.join(path)}={text}")
    assert override.path == tuple(path)
    assert override.value == value
    assert type(override.value) is type(value)


@given(PATHS, st.integers(), st.dictionaries(PARTS, st.integers(), max_size=4))
def test_an_override_changes_its_own_key_and_no_other(path: list[str], value: int, other: dict[str, int]) -> None:
    before = {**other, path[0]: {}} if len(path) > 1 else dict(other)
    frozen = repr(before)
    after = apply_overrides(before, [parse_override(f"{'.'.join(path)}={value}")])
    assert repr(before) == frozen
    found = after
    for part in path[:-1]:
        found = found[part]
    assert found[path[-1]] == value
    assert {k: v for k, v in after.items() if k != path[0]} == {k: v for k, v in other.items() if k != path[0]}


@given(st.text(max_size=30))
def test_no_text_gets_more_than_a_paragraph(text: str) -> None:
    try:
        override = parse_override(text)
    except UserError as error:
        assert "Traceback" not in str(error)
    else:
        assert override.path and all(override.path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4), ("5E3", 5000.0), (".5", 0.5), ("-3", -3), ("010", 10), ("on", "on"), ("no", "no"),
        ("true", True), ("null", None), ("~", None), ("[0.8, 1.25]", [0.8, 1.25]), ("a=b", "a=b"), ("'7'", "7"),
        ("2026-11-21", "2026-11-21"), ("1_000", "1_000"), ("0x10", "0x10"), ("12:30", "12:30"),
    ],
)  # fmt: skip
def test_a_value_is_read_as_people_mean_it(text: str, value: object) -> None:
    found = parse_override(f"key={text}").value
    assert found == value
    assert type(found) is type(value)


def test_infinity_and_not_a_number_keep_their_names() -> None:
    assert parse_override("a=.inf").value == math.inf
    assert math.isnan(parse_override("a=.nan").value)


@pytest.mark.parametrize(
    "text", ["ppo", "=3", "ppo..kl=3", ".a=1", "a.=1", "a=[1", "a={b: 1, b: 2}", "a=!!python/name:os"]
)
def test_what_is_no_key_and_value_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--set"):
        parse_override(text)


@pytest.mark.parametrize("text", ["data.preferences=", "a= ", "a=# a comment", "a=---", "a={b: , c: 1}"])
def test_an_empty_value_as_of_an_unset_shell_variable_is_refused_with_how_to_say_none(text: str) -> None:
    with pytest.raises(UserError, match=rf"--set {text}.*[Ww]rite null for none"):
        parse_override(text)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BOMB, "aliases expanded"),
        ("a: &a [*a]", "nested more than 50 deep"),
        ("data: &a {columns: *a}", "nested more than 50 deep"),
        ("a: " + "[" * 3000 + "]" * 3000, "line 1: .*nested more than 50 deep"),
        ("a:\n  " + "{b: " * 200 + "1" + "}" * 200, "line 2: .*nested more than 50 deep"),
        ("a: [" + "1, " * 30_000 + "]", "more than 20000 values"),
        ("#" * 2**21, "more than 1048576 characters"),
        ("seed: !!int [1]", "!!int does not fit this value"),
        ("seed: !!int {a: 1}", "!!int does not fit this value"),
        ("seed: !!bool maybe", "maybe"),
        ("seed: !!timestamp soon", "!!timestamp is not a type that a config can hold"),
        ("project: !!binary aGk=", "!!binary is not a type"),
        ("data: !!set {a, b}", "!!set is not a type"),
        ("seed: !mine 3", "!mine is not a type"),
        ("extends: !!python/object/apply:os.getcwd []", "is not a type"),
        ("extends: tiny\ndata:\n  preferences:\n", "line 3: .*preferences has no value; write null for none"),
        ("seed: 1\nproject: x\nseed: 2\n", "line 3: .*seed appears twice"),
        ("- 1\n", "a mapping"),
        ("\udcff\udcfe", "UTF-8"),
        ("a: [\n", "not readable as YAML"),
        ("extends: 3\n", "extends = 3"),
        ("extends: ./p.yaml\n", "extends itself"),
    ],
)
@pytest.mark.timeout(PATIENCE * 20)
def test_yaml_that_is_no_profile_or_would_fill_memory_is_refused(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "p.yaml").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(UserError, match=said) as error:
        read_profile(tmp_path / "p.yaml")
    assert str(tmp_path / "p.yaml") in str(error.value) and len(str(error.value)) < 500


def test_an_alias_of_a_value_is_read() -> None:
    assert yaml_text.parse("a: &x {b: 1}\nc: *x", "here") == {"a": {"b": 1}, "c": {"b": 1}}


def test_a_number_of_thousands_of_digits_and_a_key_of_thousands_of_parts_are_refused() -> None:
    with pytest.raises(UserError, match="more than 1000 digits"):
        parse_override("seed=" + "9" * 5000)
    with pytest.raises(UserError, match="expected KEY=VALUE") as error:
        parse_override("a." * 3000 + "b=1")
    assert len(str(error.value)) < 300


def test_a_chain_of_profiles_ends(tmp_path: Path) -> None:
    for n in range(400):
        (tmp_path / f"p{n}.yaml").write_text(f"extends: ./p{n + 1}.yaml\n")
    with pytest.raises(UserError, match="more than 20 profiles extend each other"):
        read_profile(tmp_path / "p0.yaml")


@pytest.mark.parametrize("path", ["a" * 5000 + ".yaml", "\0.yaml", "~nobody-of-that-name/x.yaml", "/dev/zero"])
def test_a_path_that_can_be_none_is_the_users_mistake(path: str) -> None:
    with pytest.raises(UserError, match=r"the profile = .*this (can't be opened|is a device)") as error:
        read_profile(path)
    assert len(str(error.value)) < 400


def test_the_last_of_two_overrides_of_one_key_holds() -> None:
    assert apply_overrides({}, [parse_override("a.b=1"), parse_override("a.b=2")]) == {"a": {"b": 2}}


def test_an_override_can_not_reach_into_a_value() -> None:
    with pytest.raises(UserError, match=r"a\.b is a value \(3\)"):
        apply_overrides({"a": {"b": 3}}, [parse_override("a.b.c=1")])


def test_a_profile_extends_one_beside_it_and_a_built_in_one(tmp_path: Path) -> None:
    (tmp_path / "below.yaml").write_text("extends: tiny\nppo: {updates: 7}\n")
    (tmp_path / "above.yaml").write_text("extends: ./below.yaml\nseed: 9\nppo: {epochs: 1}\n")
    values = read_profile(tmp_path / "above.yaml")
    assert (values["seed"], values["ppo"]["updates"], values["ppo"]["epochs"]) == (9, 7, 1)
    assert values["ppo"]["batch_size"] == read_profile("tiny")["ppo"]["batch_size"]
    assert "extends" not in values


def test_a_mistyped_profile_is_told_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Did you mean demo\?"):
        read_profile("dmeo")


def test_a_run_is_called_after_its_profile_or_file() -> None:
    assert profile_name("demo") == "demo"
    assert profile_name("configs/mine.yaml") == "mine"


DEMO_UNTIL_2026_11_26 = """\
generation: {max_prompt_tokens: 64, max_new_tokens: 64}
runtime: {dtype: float32}
data:
  generator: {demonstrations: 12000, pairs: 14000}
sft: {learning_rate: 2.0e-3, batch_size: 16, micro_batch_size: 16}
reward: {learning_rate: 5.0e-4, batch_size: 16, micro_batch_size: 16}
judge: {epochs: 6}
ppo:
  learning_rate: 7.0e-4
  warmup: 0.15
  decay: none
  beta2: 0.95
  epochs: 1
  updates: 60
  critic: {learning_rate: 1.0e-3}
  micro_batch_size: 16
  kl: {control: adaptive, coefficient: 0.1, target: 3.0, horizon: 3.2, stop_above: 9}
  watch: {kl_high: 6.5}
human_eval: {judges: simulated, items: 512}
"""
"""The options of `demo` at 03617bc2; all others had the defaults of their classes."""


def test_demo_long_has_the_options_that_were_measured(tmp_path: Path) -> None:
    """Stages' keys are made of these and of no profile's name."""
    (tmp_path / "demo.yaml").write_text(DEMO_UNTIL_2026_11_26)
    long = load_config("demo-long")
    later = {"gates": long.gates, "policy": long.policy}
    assert load_config(tmp_path / "demo.yaml").model_copy(update=later) == long


def test_data_of_ones_own_turn_off_what_only_the_simulated_truth_can_answer() -> None:
    demo = read_profile("demo")
    own = lay(demo, {"data": {"preferences": "mine.jsonl"}})
    assert own["human_eval"]["judges"] == "people"
    assert own["gates"]["validate"]["annotator_agreement"] is None
    assert own["gates"]["policy"]["violations_excess"] is None
    assert own["gates"]["policy"]["echo"] == demo["gates"]["policy"]["echo"]


def test_gates_that_come_with_data_of_ones_own_stay_on() -> None:
    above = {"data": {"preferences": "mine.jsonl"}, "gates": {"validate": {"annotator_agreement": 0.3}}}
    assert lay(read_profile("demo"), above)["gates"]["validate"]["annotator_agreement"] == 0.3
    voted = lay(read_profile("demo"), above)
    assert lay(voted, {"data": {"preferences": "other.jsonl"}})["gates"]["validate"]["annotator_agreement"] == 0.3
