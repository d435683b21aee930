"""Which two models an item compares. Both halves of a comparison use this; raters do not see it."""

import json
from collections.abc import Iterable
from pathlib import Path

from components.human_eval.blinding import AuthoredItem

MODELS = "models.json"
"""The file of a sample artifact with the two models of each item; as secret as the key."""
RESULT = "comparison.json"
"""The file of a scored comparison's artifact with its result."""
_INPUT = "model_"


class ComparedItem(AuthoredItem):
    """A line of `responses.jsonl`: `sft` is the first model's response, `policy` the second's."""

    models: list[int]
    """The two models, numbered from 0 in the order in which they were given."""


def input_name(number: int) -> str:
    """Return the name of the stage's input for model `number` (from 0): `model_1` for the first."""
    return f"{_INPUT}{number + 1}"


def model_inputs(names: Iterable[str]) -> list[str]:
    """Return the inputs that are models, in the order in which they were given."""
    return sorted((name for name in names if name.startswith(_INPUT)), key=lambda name: int(name.removeprefix(_INPUT)))


def models_of(sample: Path) -> tuple[int, dict[str, tuple[int, int]]]:
    """Return the number of models that a sample artifact compares, and the two models of each item."""
    content = json.loads((sample / MODELS).read_text(encoding="utf-8"))
    return content["models"], {item: (first, second) for item, (first, second) in content["of"].items()}
