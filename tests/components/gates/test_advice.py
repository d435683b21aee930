"""Every gate and alarm has advice, whose options exist and whose command the command line takes."""

import re

import pytest

from components.gates.gate import Gate
from components.gates.remedies import Formula
from components.gates.table import GATES
from components.ppo.alarm_table import CHOSEN, MONITORS, Monitor
from tests.documented import Typed, check_settings, parse
from tests.reference import option_names

ALARMS = {**MONITORS, "chosen": CHOSEN}
ADVISED: dict[str, Gate | Monitor] = {**GATES, **ALARMS}
COMMANDS = {name: record.command for name, record in ADVISED.items() if record.command}


def test_a_gate_or_an_alarm_without_advice_fails() -> None:
    assert [gate.name for gate in GATES.values() if not (gate.cause and gate.remedy)] == []
    assert [name for name, alarm in ALARMS.items() if not (alarm.counts and alarm.meaning and alarm.remedy)] == []
    assert [name for name, record in ADVISED.items() if not (record.changes or record.command)] == []


def test_advice_names_options_and_gates_that_there_are() -> None:
    known = option_names() | set(GATES)
    texts = {name: f"{gate.cause} {gate.remedy}" for name, gate in GATES.items()}
    named = {(of, name) for of, text in texts.items() for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)[`=]", text)}
    named |= {(of, name) for of, each in ALARMS.items() for name in re.findall(r"\b\w+\.[\w.]*\w", each.remedy)}
    named |= {(name, change.option) for name, record in ADVISED.items() for change in record.changes}
    assert len(named) > 150
    assert [each for each in sorted(named) if each[1] not in known and not each[1].endswith((".jsonl", ".json"))] == []


def test_a_number_that_is_advised_is_computed_from_the_runs() -> None:
    changes = [change for record in ADVISED.values() for change in record.changes]
    assert [change for change in changes if not isinstance(change.value, (Formula, str, bool))] == []
    assert [name for name, command in COMMANDS.items() if re.search(r"--set \S+=[\d.]", command)] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_advice_ends_with_a_command_that_can_be_typed(name: str) -> None:
    command = Typed(COMMANDS[name].removeprefix("tether "), True)
    assert COMMANDS[name].startswith("tether ")
    check_settings(parse(command))
