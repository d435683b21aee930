"""Write a model from the store as a Hugging Face folder, for `tether export` and for MLflow."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from components.base.errors import TetherError
from components.base.hashing import digest_file
from components.base.jsonl import write_json
from components.base.nested import group
from components.store.records import Record

SCALE = "reward.json"


def copy_model(artifact: Path, record: Record, out: Path, link: bool = False) -> None:
    """Fill `out` with the model of an artifact, and verify each file against the record.

    The artifact's `model/` becomes `out` itself. generation_config.json gets the sampling settings with which the model
    was trained and evaluated, and a reward model's config.json its scale (`score_scale`).

    With `link` the weights are links to the artifact's, for a reader that does not change them.

    Raises:
        TetherError: a file differs from what the record says.
    """
    for name, sha in record.files.items():
        if (place := place_of(name)) is None:
            continue
        target = out / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if link and name.endswith(".safetensors"):
            target.symlink_to((artifact / name).resolve())
        else:
            shutil.copyfile(artifact / name, target)
        if digest_file(target) != sha:
            raise TetherError(f"{name} was not copied as it is in the store. The disk or its memory may be at fault.")
    _state_sampling(out, group(record.job, "generation"))
    _state_scale(out)


def place_of(name: str) -> str | None:
    """Return where a file of an artifact goes (`model/` is the folder itself); None if it is not part of the model."""
    first, _, rest = name.partition("/")
    if first == "model":
        return rest
    if first == "members":
        number, part, below = rest.split("/", 2)
        return f"members/{number}/{below if part == 'model' else f'{part}/{below}'}"
    return name if first == "adapter" or name == SCALE else None


def _state_sampling(out: Path, generation: Mapping[str, JsonValue]) -> None:
    """Make `generate` and vLLM sample as in training and evaluation; transformers' default would use top-k 50."""
    path = out / "generation_config.json"
    if path.is_file() and generation:
        sampling = {"do_sample": True, "temperature": generation["temperature"], "top_k": 0, "top_p": 1.0}
        stop = {"stop_strings": generation["stop"]} if generation.get("stop") else {}
        _update(path, {**sampling, "max_new_tokens": generation["max_new_tokens"], **stop})


def _state_scale(out: Path) -> None:
    """Write shift, scale and temperature of a reward model's scores into its config, and each member's."""
    if (out / SCALE).is_file():
        scale = json.loads((out / SCALE).read_text(encoding="utf-8"))
        for path in (out / "config.json", *out.glob("members/*/config.json")):
            _update(path, {"score_scale": scale})


def _update(path: Path, more: Mapping[str, JsonValue]) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | dict(more))
