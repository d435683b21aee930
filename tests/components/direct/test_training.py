"""The alarm `chosen`: which updates it compares with its limit."""

import logging

import pytest

from components.direct.training import ChosenAlarm
from components.ppo.alarm_table import CHOSEN, WINDOW
from components.training.updates import Update


def test_the_alarm_compares_the_last_8_batches_with_a_chosen_one(caplog: pytest.LogCaptureFixture) -> None:
    """Batches of undesirable single labels (KTO) have no log-ratio: their updates do not count."""
    caplog.set_level(logging.WARNING)
    alarm, raised = ChosenAlarm(limit=-2.5, stops=False), []
    ratios = [-1.0] * 7 + [None] * 9 + [-9.0, None, -9.0]
    for number, ratio in enumerate(ratios, 1):
        metrics = {} if ratio is None else {"direct/chosen_log_ratio": ratio}
        alarm.on_update(Update(number=number, total=20, model=None, metrics=metrics, tokens=0))
        raised.append(alarm.raised)
    assert raised == [0] * 18 + [19]
    assert "over the last 8 updates with such responses" in caplog.text


def test_the_guide_says_which_updates_the_alarm_reads() -> None:
    assert f"the last {WINDOW} updates that have any, or of all so far if they are fewer" in CHOSEN.counts
