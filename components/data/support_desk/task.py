"""The task of the data, and the true scores of the built-in one, the only task that has a gold score."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from components.data.support_desk import desk

SUPPORT_DESK = "support-desk"


@cache
def task_name(data: Path) -> str:
    """Return the task of a validate artifact: `support-desk`, or `none` for other data."""
    return json.loads((data / "task.json").read_text())["name"]


def task_scores(data: Path, prompt: Sequence[Mapping[str, str]], response: str) -> dict[str, float]:
    """Return gold score, policy violations and echoes of a response on the built-in task; empty for other data."""
    return desk.scores(prompt, response) if task_name(data) == SUPPORT_DESK else {}


SIMULATED = "Votes, judges, gold scores and violations come from the built-in task: all of them are simulated."
