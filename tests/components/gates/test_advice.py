"""Every gate and alarm has advice, whose options exist and whose command the command line takes."""

import re

import pytest

from components.gates.advice import ADVICE
from components.gates.table import GATES
from components.ppo.monitors.alarms import MONITORS
from tests.documented import Typed, check_settings, parse
from tests.reference import ALARM_ADVICE, option_names

COMMANDS = {name: each.command for name, each in {**ADVICE, **ALARM_ADVICE}.items()}


def test_a_gate_or_an_alarm_without_advice_fails() -> None:
    assert list(ADVICE) == list(GATES)
    assert list(ALARM_ADVICE) == list(MONITORS)


def test_advice_names_options_and_gates_that_there_are() -> None:
    known = option_names() | set(GATES)
    texts = {name: f"{each.means} {each.change}" for name, each in ADVICE.items()}
    named = {(of, name) for of, text in texts.items() for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[`=]", text)}
    assert len(named) > 80
    assert [each for each in sorted(named) if each[1] not in known and not each[1].endswith((".jsonl", ".json"))] == []


def test_an_alarms_remedy_names_options_and_gates_that_there_are() -> None:
    known = option_names() | set(GATES)
    named = {(of, name) for of, each in MONITORS.items() for name in re.findall(r"\b\w+\.[\w.]*\w", each.remedy)}
    assert len(named) > 10
    assert [each for each in sorted(named) if each[1] not in known] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_advice_ends_with_a_command_that_can_be_typed(name: str) -> None:
    command = Typed(COMMANDS[name].removeprefix("tether "), True)
    assert COMMANDS[name].startswith("tether ")
    check_settings(parse(command))
