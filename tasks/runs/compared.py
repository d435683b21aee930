"""What a run that compares models remembers of their names."""

import json
from collections.abc import Mapping

from components.human_eval.comparison.pairs import input_name

COMPARED = "compare"
"""What a run's origin calls the models that it compares."""


def compared_names(origin: Mapping[str, str]) -> dict[str, str]:
    """Return what the user called each model, by the input that holds it; empty where a run compares none."""
    names = json.loads(origin[COMPARED])["names"] if COMPARED in origin else []
    return {input_name(number): name for number, name in enumerate(names)}
