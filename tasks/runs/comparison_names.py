"""The names of the models in a comparison, from a run's origin."""

import json
from collections.abc import Mapping

from components.human_eval.comparison.model_pairs import input_name

COMPARED = "compare"
"""The entry of a run's origin for the compared models."""


def compared_names(origin: Mapping[str, str]) -> dict[str, str]:
    """Return the user's name for each model, by input name; empty if the run is not a comparison."""
    names = json.loads(origin[COMPARED])["names"] if COMPARED in origin else []
    return {input_name(number): name for number, name in enumerate(names)}
