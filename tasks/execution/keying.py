"""Build a stage's key from its options and inputs."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path

from components.base.errors import UserError
from components.base.settings import Settings
from components.data.inputs import JUDGE, of_kind
from components.data.support_desk.task import SUPPORT_DESK, task_name
from components.keys.changes import KeyParts
from components.keys.fingerprint import ROOT, stage_key
from tasks.result import Input
from tasks.stages import Stage

Inputs = Mapping[str, Input]


def key_of(stage: Stage, job: Settings, inputs: Inputs, root: Path = ROOT) -> tuple[str, KeyParts]:
    """Return the key of a stage and its parts (`components.keys.fingerprint.stage_key`)."""
    digests = {name: source.digest for name, source in inputs.items()}
    task = built_in_task(stage, inputs)
    return stage_key(stage.name, job, digests, stage.module, (*stage.libraries, *_optional(job)), root, task)


def _optional(job: Settings) -> list[str]:
    """Return libraries that only some options use and that change a stage's result, if they are installed."""
    options = job.model_dump_json()
    if '"adamw_8bit"' not in options and '"4bit"' not in options:
        return []
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(
            "optimizer=adamw_8bit and lora.quantize=4bit need bitsandbytes, which is not installed. Install it with "
            "pip install 'tether[bitsandbytes]', or leave the option out."
        )
    return ["bitsandbytes"]


def built_in_task(stage: Stage, inputs: Inputs) -> str | None:
    """Return the built-in task that a stage's data come from; None for people's data.

    Without preferences, `validate` generates the task's pairs and writes the task's name into its artifact, which later
    stages read as their input `data`. `validate.judge` does the same.
    """
    reads = {"validate": "preferences", "validate.judge": JUDGE}
    if stage.name in reads:
        return None if of_kind(inputs, reads[stage.name]) else SUPPORT_DESK
    data = inputs["data"].path if "data" in inputs else None
    made_there = data is not None and (data / "task.json").is_file() and task_name(data) == SUPPORT_DESK
    return SUPPORT_DESK if made_there else None


def whole_job(job: Settings, inputs: Inputs) -> KeyParts:
    """Return a stage's options and inputs, also what is in no key: a hit compares them with those of its record."""
    return {"job": job.model_dump(mode="json"), "inputs": {name: source.digest for name, source in inputs.items()}}
