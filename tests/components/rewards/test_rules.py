"""The team's own policy: what counts as a violation, and what is said of a rule that is none."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from components.base.errors import UserError
from components.base.settings import keyed_values
from components.rewards.config import RulesConfig
from components.rewards.rules import RuleActions, Rules, rule_metrics
from flows.config.profiles import parse_override
from flows.config.run_config import check_config, load_config, to_values
from flows.data.reward_sources import read_rules, settled_rewards
from flows.deployment.register import with_absolute_paths
from tasks.execution.keying import key_of
from tasks.stages import STAGES
from tests.splits import write_split

ASKED = [[{"role": "user", "content": text}] for text in ("Late?", "Broken?", "Both?")]
SAID = ["We promise. WE PROMISE a refund.", "Fine.", "promise"]
MODULE = """
import words

def count(prompts, responses, rows):
    return [text.lower().count(words.BAD) + row.get("extra", 0) for text, row in zip(responses, rows)]

def below(prompts, responses, rows):
    return [-1.0] * len(responses)

def half(prompts, responses, rows):
    return [0.5] * len(responses)
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A validate artifact in which the second prompt has a further column."""
    rows = [{"prompt": prompt} for prompt in ASKED]
    write_split(tmp_path / "prompts.test", [rows[0], rows[1] | {"columns": {"extra": 2}}, rows[2]])
    return tmp_path


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "policy.py").write_text(MODULE)
    (tmp_path / "words.py").write_text("BAD = 'promise'\n")
    yield tmp_path


def test_each_match_of_each_pattern_is_a_violation(data: Path) -> None:
    with Rules(RulesConfig(patterns={"promise": "(?i)promise", "refund": r"\brefund\b"}), data) as rules:
        found = rules.count(ASKED, SAID)
    assert found == [
        {"violations": 3, "promise": 2, "refund": 1},
        {"violations": 0, "promise": 0, "refund": 0},
        {"violations": 1, "promise": 1, "refund": 0},
    ]
    assert rule_metrics(found, "ppo/") == pytest.approx(
        {"ppo/rule_violations": 4 / 3, "ppo/rule_promise": 1.0, "ppo/rule_refund": 1 / 3}
    )


def test_a_function_counts_with_the_prompts_columns(data: Path, module: Path) -> None:
    with Rules(RulesConfig(function="policy:count", root=str(module)), data) as rules:
        assert rules.count(ASKED, SAID) == [{"violations": 2}, {"violations": 2}, {"violations": 1}]


@pytest.mark.parametrize(("name", "gave"), [("below", "-1"), ("half", "0.5")])
def test_a_count_that_is_none_is_the_users_mistake(data: Path, module: Path, name: str, gave: str) -> None:
    said = rf"ppo.rules: function:policy:{name}: it gives {gave} for response 1 of 3"
    options = RulesConfig(function=f"policy:{name}", root=str(module))
    with Rules(options, data) as rules, pytest.raises(UserError, match=said):
        rules.count(ASKED, SAID)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"patterns": {"a": "("}}, "is not a regular expression"),
        ({"patterns": {"a": "x*"}}, "matches the empty text"),
        ({"patterns": {"violations_all": "x"}}, "does not begin with violations"),
        ({"patterns": {"two words": "x"}}, "a name has letters"),
        ({}, "set either file"),
        ({"patterns": {"a": "x"}, "function": "m:f"}, "set either file"),
        ({"patterns": {"a": "x"}, "drop": ["b"]}, "rules.drop: there is no rule b. Name one of violations, a"),
        ({"function": "m:f", "penalty": {"a": 1}}, r"rules.penalty: there is no rule a. Name one of violations \["),
        ({"patterns": {"a": "x"}, "drop": ["a"], "penalty": {"a": 1}}, "a is in drop and in penalty"),
        ({"patterns": {"a": "x"}, "penalty": {"a": -0.5}}, "rules.penalty: a is -0.5. Set it above 0"),
        ({"patterns": {"a": "x"}, "penalty": {"a": True}}, "true and false are not numbers"),
    ],
)  # fmt: skip
def test_a_rule_that_is_none_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RulesConfig(**given)


def asked(**rules: Any) -> Any:
    values: Any = to_values(load_config("tiny"))
    values["ppo"]["rules"] = rules
    return check_config(values, "test")


def key(found: Any) -> str:
    return key_of(STAGES["ppo"], found.stage_job(STAGES["ppo"]), {})[0]


def test_a_files_patterns_are_in_the_key_and_its_path_is_not(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("promise: (?i)promise\n")
    (tmp_path / "moved.json").write_text('{"promise": "(?i)promise"}')
    found, _ = settled_rewards(asked(file=str(tmp_path / "rules.yaml")), tmp_path)
    moved, _ = settled_rewards(asked(file=str(tmp_path / "moved.json")), tmp_path)
    assert found.ppo.rules.patterns == {"promise": "(?i)promise"} and key(found) == key(moved)
    (tmp_path / "rules.yaml").write_text("promise: promise\n")
    edited, _ = settled_rewards(found, tmp_path)
    assert key(edited) != key(found), "what an earlier run read is read anew"


def test_only_actions_that_are_set_are_in_the_key() -> None:
    plain = keyed_values(asked(patterns={"a": "x"}).stage_job(STAGES["ppo"]))
    assert {"drop", "penalty"}.isdisjoint(plain["ppo"]["rules"]) and "balance" not in plain["ppo"]
    acting = asked(patterns={"a": "x", "b": "y"}, drop=["a"], penalty={"b": 0.5})
    assert key(acting) != key(asked(patterns={"a": "x", "b": "y"}))
    found = keyed_values(acting.stage_job(STAGES["ppo"]))["ppo"]["rules"]
    assert (found["drop"], found["penalty"]) == (["a"], {"b": 0.5})
    balanced = load_config("tiny", [parse_override("ppo.balance=category")])
    assert keyed_values(balanced.ppo) == keyed_values(load_config("tiny").ppo) | {"balance": "category"}


def test_an_action_on_a_rule_that_its_file_lacks_is_refused_when_the_run_begins(tmp_path: Path) -> None:
    (tmp_path / "rules.yaml").write_text("promise: promise\n")
    named = asked(file=str(tmp_path / "rules.yaml"), drop=["promise"], penalty={"refund": 1})
    with pytest.raises(UserError, match=r"rules.yaml: rules.penalty: there is no rule refund. Name one of violations"):
        settled_rewards(named, tmp_path)
    (tmp_path / "rules.yaml").write_text("promise: promise\nrefund: refund\n")
    assert settled_rewards(named, tmp_path)[0].ppo.rules.patterns.keys() == {"promise", "refund"}


@pytest.mark.parametrize("method", ["dpo", "ipo", "kto", "best_of_n"])
@pytest.mark.parametrize("option", ["ppo.rules.drop=[a]", "ppo.rules.penalty={a: 1}", "ppo.balance=category"])
def test_a_direct_method_has_no_updates_to_act_on(method: str, option: str) -> None:
    chosen = [parse_override(f"policy.method={method}"), parse_override("ppo.rules.patterns={a: x}")]
    load_config("tiny", chosen)
    with pytest.raises(UserError, match=rf"ppo\.(rules|balance)\S* has no effect with policy.method={method}"):
        load_config("tiny", [*chosen, parse_override(option)])
    load_config("tiny", [parse_override("policy.method=online_dpo"), chosen[1], parse_override(option)])


def test_a_response_that_is_left_alone_is_left_out_too() -> None:
    config, kept, dropped = RulesConfig(patterns={"a": "x"}, drop=("a",)), {"a": 0.0}, {"a": 1.0}
    assert RuleActions.of(config, [dropped, kept, dropped], 1).rows == []
    assert RuleActions.of(config, [dropped, kept, kept], 1).rows == [1, 2]


def test_an_edit_of_a_module_that_the_function_imports_misses(tmp_path: Path, module: Path) -> None:
    found, _ = settled_rewards(asked(function="policy:count", root=str(module)), tmp_path)
    (module / "words.py").write_text("BAD = 'refund'\n")
    assert key(settled_rewards(found, tmp_path)[0]) != key(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it has no rules"),
        ("a: 3", "the pattern 3 is not text"),
        ("a: (", "is not a regular"),
        ("- a", "is a list"),
    ],
)
def test_a_file_of_rules_that_is_none_is_refused_by_its_name(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "rules.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"rules.yaml.*{said}"):
        read_rules(str(tmp_path / "rules.yaml"))
    with pytest.raises(UserError, match=r"absent.yaml.*cannot be read"):
        read_rules(str(tmp_path / "absent.yaml"))


def test_a_deployment_finds_the_file_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rules.yaml").write_text("a: x\n")
    monkeypatch.chdir(tmp_path)
    assert with_absolute_paths(asked(file="rules.yaml")).ppo.rules.file == str(tmp_path / "rules.yaml")
