"""Which task the data come from, and its truth where that is known: only the built-in one has a gold score."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from components.data.support_desk import desk

SUPPORT_DESK = "support-desk"


@cache
def task_name(data: Path) -> str:
    """The task of a validate artifact: `support-desk`, or `none` for people's data."""
    return json.loads((data / "task.json").read_text())["name"]


def task_scores(data: Path, prompt: Sequence[Mapping[str, str]], response: str) -> dict[str, float]:
    """Gold score, policy violations and echoes of a response on the built-in task; empty for people's data."""
    return desk.scores(prompt, response) if task_name(data) == SUPPORT_DESK else {}


SIMULATED = "Votes, judges, gold scores and violations come from the built-in task: all of them are simulated."
