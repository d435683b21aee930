"""A comparison's models: resolve the names that the user gives to inputs, and print the result."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from components.base.errors import UserError
from components.base.paths import user_path
from components.base.text import counted
from components.human_eval.comparison.model_pairs import RESULT, input_name
from components.store.graph import Graph
from components.store.store import ArtifactStore
from flows.data.candidates import STAGES, find_models
from tasks.result import Input
from tasks.runs.comparison_names import COMPARED
from tasks.runs.status import has_run
from tasks.tracking.registry import find_version


def find_compared(home: Path, names: Sequence[str]) -> dict[str, Input]:
    """Return the models that `names` gives, as the inputs `model_1` to `model_k`.

    A name is a registered model (`tether-policy@champion`, `tether-policy/3`), RUN:STAGE, a run (its policy) or the
    folder of a language model.

    Raises:
        UserError: there are fewer than two names, a name is unknown, or one model is given twice.
    """
    if len(names) < 2:
        raise UserError(
            "compare: name two or more models, such as tether-policy@champion RUN:ppo. The first is the baseline."
        )
    models: dict[str, Input] = {}
    by_digest: dict[str, str] = {}
    for number, name in enumerate(names):
        model = find_language_model(home, name, "compare")
        if model.digest in by_digest:
            raise UserError(f"compare: {name} is the same model as {by_digest[model.digest]}. Give each model once.")
        by_digest[model.digest] = name
        models[input_name(number)] = model
    return models


def find_language_model(home: Path, name: str, command: str) -> Input:
    """Return the model that a user gave to a command, in the forms of `find_compared`.

    Raises:
        UserError: there is no such model, or it is not a language model.
    """
    store = ArtifactStore(home)
    named = f"{name}:ppo" if has_run(home, name) else name
    run, _, stage = named.rpartition(":")
    of_run = bool(run) and stage in STAGES and has_run(home, run)
    if of_run or user_path(name, command).is_dir():
        (model,) = find_models([named], home, command)
        return _stored(store, model.digest, stage) if of_run else Input.of(model.folder)
    version = find_version(home, name)
    records = Graph.of(store).node(version.digest).records if version is not None else ()
    for record in records:
        if record.stage in STAGES:
            return _stored(store, record.digest, record.stage)
    raise UserError(
        f"{command}: {name} is not a language model here. Name a registered one (tether-policy@champion, "
        "tether-policy/3; `tether lineage` shows them) that sft or ppo computed here, RUN or RUN:sft, or the folder of "
        "one."
    )


def _stored(store: ArtifactStore, digest: str, stage: str) -> Input:
    imported = Graph.of(store).rests_on_import([digest])
    return Input(digest=digest, path=store.path(digest), stage=stage, stored=True, imported=imported)


def as_origin(names: Sequence[str], inputs: Mapping[str, Input]) -> str:
    """Return what a run's status stores about a comparison: the models in order, and `data`."""
    described = {name: {"digest": i.digest, "path": str(i.path), "stage": i.stage} for name, i in inputs.items()}
    return json.dumps({"names": list(names), "inputs": described})


def of_origin(home: Path, origin: Mapping[str, str]) -> dict[str, Input]:
    """Return the inputs that a run's status stores for a comparison; empty if the run is not one."""
    if COMPARED not in origin:
        return {}
    store = ArtifactStore(home)
    return {
        name: _stored(store, of["digest"], of["stage"]) if of["stage"] else Input(digest=of["digest"], path=of["path"])
        for name, of in json.loads(origin[COMPARED])["inputs"].items()
    }


def result_text(artifact: Path, names: Mapping[str, str]) -> str:
    """Return the result of a comparison as Markdown: the strengths, and a line for each pair of models."""
    result = json.loads((artifact / RESULT).read_text(encoding="utf-8"))

    def called(model: str) -> str:
        return names.get(model, model)

    people = counted(result["raters"], "rater") + (" (simulated)" if result["judges"] == "simulated" else "")
    items, baseline = counted(result["items"], "item"), called(result["baseline"])
    lines = [f"{items} judged by {people}; the baseline is {baseline}.", ""]
    if result["inseparable"]:
        sides = [", ".join(map(called, side)) for side in (result.get("better", []), result.get("worse", []))]
        lines += [f"No strengths: {result['inseparable']} ({sides[0]} against {sides[1]})." if sides[0] else
                  f"No strengths: {result['inseparable']}.", ""]  # fmt: skip
    else:
        lines += [f"| model | strength (logit), {result['level']:.0%} over {result['interval_over']} |", "|---|---|"]
        lines += [
            f"| {called(strength['model'])} | {_strength(strength, strength['model'] == result['baseline'])} |"
            for strength in result["models"]
        ]
        lines += ["", f"Davidson's tie parameter: {_number(result['tie'].get('nu'))}.", ""]
    lines += ["| models | items | wins | ties | losses | win rate of the first |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {called(row['first'])} against {called(row['second'])} | {row['items']} | {row['wins']} | {row['ties']} | "
        f"{row['losses']} | {row['win_rate']:.3f} ({row['low']:.3f} to {row['high']:.3f}) |"
        for row in result["pairs"]
    ]
    return "\n".join([*lines, *(["", result["too_few_raters"]] if result["too_few_raters"] else [])]) + "\n"


def _strength(model: Mapping[str, Any], baseline: bool) -> str:
    if baseline:
        return "0 (the baseline)"
    if model["low"] is None:
        return f"{_number(model['strength'])} (no interval: too many resamples have only wins or only losses)"
    return f"{_number(model['strength'])} ({_number(model['low'])} to {_number(model['high'])})"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3f}"
