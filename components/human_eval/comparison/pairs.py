"""Which two models an item compares: what both halves of a comparison know, and raters do not."""

import json
from collections.abc import Iterable
from pathlib import Path

from components.human_eval.blinding import JudgedItem

MODELS = "models.json"
"""The file of a sample artifact that says so; as secret as the key."""
RESULT = "comparison.json"
"""What a scored comparison says, in its artifact."""
_INPUT = "model_"


class ComparedItem(JudgedItem):
    """A line of `responses.jsonl`: `sft` is the first of two models' response, `policy` the second's."""

    models: list[int]
    """The two, numbered from 0 in the order in which they were given."""


def input_name(number: int) -> str:
    """The input of a stage that holds model `number` (from 0), `model_1` for the first."""
    return f"{_INPUT}{number + 1}"


def model_inputs(names: Iterable[str]) -> list[str]:
    """The inputs that are models, in the order in which they were given."""
    return sorted((name for name in names if name.startswith(_INPUT)), key=lambda name: int(name.removeprefix(_INPUT)))


def models_of(sample: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """How many models a sample artifact compares, and which two each item does."""
    told = json.loads((sample / MODELS).read_text(encoding="utf-8"))
    return told["models"], {item: (first, second) for item, (first, second) in told["of"].items()}
